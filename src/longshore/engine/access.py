"""Functions that read and write full float32 values of a parameter, wherever its state is.

All ranks have to call each function, in the same order and with the same parameter; each rank gets, or passes, the
whole tensor.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from longshore.errors import ParameterError
from longshore.kernels.reference import adopted
from longshore.optim.core import OptimizerCore
from longshore.optim.handed_out import StateMap
from longshore.optim.parameters import ParameterRecord
from longshore.optim.released import is_released
from longshore.optim.released_gradients import released_gradient
from longshore.optim.shards import flat, held_part, is_sharded, like, present
from longshore.optim.tiled_optimizer import TiledOptimizer, core_of
from longshore.tiles import GRADIENT, MASTER

_OPTIMIZERS: list[weakref.ref[TiledOptimizer]] = []
"""Weak references to the optimizers of all engines."""


def register(optimizer: TiledOptimizer) -> None:
    """Register an engine's optimizer, so that the functions below find its parameters."""
    _OPTIMIZERS[:] = [reference for reference in _OPTIMIZERS if reference() is not None] + [weakref.ref(optimizer)]


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """Return the master as the next step will read it, with later writes to the parameter: float32 on the CPU
    in the parameter's shape, or None if no engine steps the parameter."""
    found = _find(param)
    if found is None:
        return None
    core, record = found
    store = core.store
    master = _copy(store.read_values(record.index, record.values()))
    if record.has_master:
        master = adopted(store.read_state(record.index, MASTER), master.to(record.dtype))
    return master.view(record.shape)


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set the master to ``value``, and the parameter to the rounded values.

    Raises:
        ValueError: the shape differs, or no engine steps the parameter.
        ParameterError: the parameter is whole now, inside :func:`longshore.gather`.
    """
    core, record = _found(param, value)
    store = core.store
    if store.residence.is_whole(record.index):
        raise ParameterError(
            f"parameter {record.name} is whole inside gather(), at whose end its values would replace this master; "
            "write to it like to any tensor, with modifier_rank, or call this outside of the block"
        )
    core.take_edits()
    with torch.no_grad():
        part = store.held(record.index, flat(value))
        record.held.copy_(part.view(record.held.shape))
        for each in (record.parameter, record.leaf()):
            if each is not None:
                torch.autograd.graph.increment_version(each)
    if record.index in store:
        store.write_state(record.index, MASTER, flat(_copy(value)))
        record.has_master = True
        record.mark_published()  # the parameter is the rounded master now
        core.handed_out.follow(core, {record.index})


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """Return a state such as ``exp_avg``, float32 on the CPU in the parameter's shape, or None before the first step.

    Raises:
        ValueError: the optimizer has no state of this name.
    """
    found = _find(param)
    if found is None:
        return None
    _check_key(*found, optim_state_key)
    return StateMap(found[0])[found[1].parameter].get(optim_state_key)


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set a state such as ``exp_avg`` to a tensor of the parameter's shape.

    Raises:
        ValueError: the shape or the name is wrong, or no engine steps the parameter.
    """
    core, record = _found(param, value)
    _check_key(core, record, optim_state_key)
    StateMap(core)[record.parameter][optim_state_key] = value


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """Return the gradient of this window so far, reduced over the ranks, float32 on the CPU, or None if there is none.

    ``step()`` would use these values, after unscaling and clipping. Of a parameter that no engine steps it is
    ``.grad``, or what an optimizer with ``release_gradients=True`` took to the host, of this rank (of a ``DTensor`` of
    all).
    """
    found = _find(param)
    if found is None:
        return _without_engine(param)
    core, record = found
    gradients = core.window_gradients(reading=True)
    if record.index not in gradients:
        return None
    gradient = gradients[record.index]
    if gradient is None:
        gradient = core.store.read_state(record.index, GRADIENT)
    return _copy(gradient).view(record.shape)


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Replace the parameter's reduced gradient of this window, in the dtype in which it is kept.

    Raises:
        ValueError: the shape differs, no engine steps the parameter, or it has no gradient in this window.
    """
    core, record = _found(param, value)
    if core.window_gradients(reading=True).get(record.index, value) is not None:
        raise ValueError(f"parameter {record.name} has no gradient in this window; there is nothing to replace")
    core.store.write_state(record.index, GRADIENT, flat(_copy(value)))


def _without_engine(param: Tensor) -> Tensor | None:
    """Return the gradient of a parameter that no engine steps, as :func:`safe_get_full_grad`."""
    gradient: Any = param.grad
    if is_released(gradient):
        held = released_gradient(param)
        if held is None:
            return None
        gradient = held.view(held_part(param).shape)
        gradient = like(param, gradient.to(param.device)) if is_sharded(param) else gradient
    if gradient is None:
        return None
    return _copy(gradient.full_tensor() if is_sharded(gradient) else gradient.to_dense())


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to(device="cpu", dtype=torch.float32, copy=True)


def _find(param: Tensor) -> tuple[OptimizerCore, ParameterRecord] | None:
    if not isinstance(param, Tensor):
        raise TypeError(f"expected a parameter, not {type(param).__name__}")
    param = present(param)
    for reference in reversed(_OPTIMIZERS):
        if (optimizer := reference()) is None:
            continue
        core = core_of(optimizer)
        for record in core.records:
            # Between forward and backward FSDP2 replaces the parameter by the gathered one, which is the leaf.
            if param is record.parameter or param is record.leaf():
                core.store.check_usable()
                return core, record
    return None


def _found(param: Tensor, value: Tensor) -> tuple[OptimizerCore, ParameterRecord]:
    """Return the core and the record of a parameter; raise ValueError if there is none or the shapes differ."""
    found = _find(param)
    if found is None:
        raise ValueError("no engine steps this tensor: it is not a parameter that was passed to longshore.initialize()")
    record = found[1]
    if not isinstance(value, Tensor) or value.shape != record.shape:
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"parameter {record.name} has shape {list(record.shape)}, and the value is {shape}")
    return found


def _check_key(core: OptimizerCore, record: ParameterRecord, key: str) -> None:
    arrays, family = core.store.tiles.arrays, record.family
    known = [name for name in family.states if name in arrays or name == family.matrix_state]
    if key not in known:
        raise ValueError(f"the optimizer's state has {', '.join(known) or 'no arrays'}, and no {key!r}")

"""Whole values of parameters: functions that read and write them in float32, and blocks in which they are gathered.

All ranks have to call each function, in the same order and with the same parameter; each rank gets, or passes, the
whole tensor.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longshore.engine.creation import FirstBlock, send, unplaced
from longshore.errors import ParameterError, RankError
from longshore.kernels.reference import adopted
from longshore.optim.core import OptimizerCore
from longshore.optim.dtensor import flat, held_part, is_sharded, like, present
from longshore.optim.grad_placeholder import is_released
from longshore.optim.gradients import released_gradient
from longshore.optim.parameters import ParameterRecord
from longshore.optim.tiled_optimizer import TiledOptimizer, core_of
from longshore.optim.user_state import StateMap
from longshore.ranks.waiting import gather_from_all
from longshore.tiles import GRADIENT, MASTER

if TYPE_CHECKING:
    from longshore.stage3.fsdp import GatherBlock

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
    store = core.members.store
    master = _copy(store.ownership.assemble_values(record.index, record.values()))
    if record.has_master:
        master = adopted(store.states.read(record.index, MASTER), master.to(record.dtype))
    return master.view(record.shape)


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set the master to ``value``, and the parameter to the rounded values.

    Raises:
        ValueError: the shape differs, or no engine steps the parameter.
        ParameterError: the parameter is whole now, inside :func:`longshore.gather`.
    """
    core, record = _found(param, value)
    members, store = core.members, core.members.store
    if store.residence.is_whole(record.index):
        raise ParameterError(
            f"parameter {record.name} is whole inside gather(), at whose end its values would replace this master; "
            "write to it like to any tensor, with modifier_rank, or call this outside of the block"
        )
    members.user_state.write_back(members)
    with torch.no_grad():
        part = store.ownership.held(record.index, flat(value))
        record.held.copy_(part.view(record.held.shape))
        for each in (record.parameter, record.leaf()):
            if each is not None:
                torch.autograd.graph.increment_version(each)
    if record.index in store.ownership:
        store.states.write(record.index, MASTER, flat(_copy(value)))
        record.has_master = True
        record.mark_published()  # the parameter is the rounded master now
        members.user_state.follow(members, {record.index})


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """Return a state such as ``exp_avg``, float32 on the CPU in the parameter's shape, or None before the first step.

    Raises:
        ValueError: the optimizer has no state of this name.
    """
    found = _find(param)
    if found is None:
        return None
    _check_key(*found, optim_state_key)
    return StateMap(found[0].members)[found[1].parameter].get(optim_state_key)


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set a state such as ``exp_avg`` to a tensor of the parameter's shape.

    Raises:
        ValueError: the shape or the name is wrong, or no engine steps the parameter.
    """
    core, record = _found(param, value)
    _check_key(core, record, optim_state_key)
    StateMap(core.members)[record.parameter][optim_state_key] = value


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
        gradient = core.members.store.states.read(record.index, GRADIENT)
    return _copy(gradient).view(record.shape)


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Replace the parameter's reduced gradient of this window, in the dtype in which it is kept.

    Raises:
        ValueError: the shape differs, no engine steps the parameter, or it has no gradient in this window.
    """
    core, record = _found(param, value)
    if core.window_gradients(reading=True).get(record.index, value) is not None:
        raise ValueError(f"parameter {record.name} has no gradient in this window; there is nothing to replace")
    core.members.store.states.write(record.index, GRADIENT, flat(_copy(value)))


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
        for record in core.members.records:
            # Between forward and backward FSDP2 replaces the parameter by the gathered one, which is the leaf.
            if param is record.parameter or param is record.leaf():
                core.members.store.states.check_usable()
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
    arrays, family = core.members.store.tiles.tier.elementwise.names, record.family
    known = [name for name in family.states if name in arrays or name == family.matrix_state]
    if key not in known:
        raise ValueError(f"the optimizer's state has {', '.join(known) or 'no arrays'}, and no {key!r}")


@contextlib.contextmanager
def gather(params: nn.Module | Tensor | Iterable[Tensor], modifier_rank: int | None = None) -> Iterator[list[Tensor]]:
    """Gather whole parameters inside a ``with`` block, to read or to write them; every rank has to enter and leave it.

    Inside, the parameters are whole wherever a script has them: the model's (``layer.weight``), those of
    ``parameters()``, the optimizer's, and those from before ``initialize()``; all are the same values. ``with`` returns
    them, in order. Tensors that share their memory (``p.detach()``, ``p.numpy()``) stay valid afterwards. This works at
    every stage: parameters that are not sharded are returned as they are. Before ``initialize()`` parameters that were
    made in :class:`longshore.Init` have rank 0's values inside, on all ranks.

    Args:
        params: a model or a module (all of its parameters), one parameter, or several.
        modifier_rank: the rank that may write; its values are copied to all ranks afterwards, and are the masters from
            the next step on. None: no rank writes.

    Raises:
        ValueError: a DTensor belongs to no model of ``longshore.initialize``, or the rank does not exist.
        ParameterError: at the end, on all ranks: a sharded parameter was written without ``modifier_rank``, or was
            given memory of another shape, dtype or device. All keep the values from before; before ``initialize()``
            rank 0's own parameters have its writes.
        RankError: at the end: another rank left the block by an exception; values as above. Or the ranks gather
            different parameters.
    """
    wanted = list(params.parameters()) if isinstance(params, nn.Module) else params
    wanted = [wanted] if isinstance(wanted, Tensor) else list(wanted)
    for entry in wanted:
        if not isinstance(entry, Tensor):
            raise TypeError(f"gather() takes parameters or a module, not {type(entry).__name__}")
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    ranks = dist.get_world_size() if several else 1
    if modifier_rank is not None and not (isinstance(modifier_rank, int) and 0 <= modifier_rank < ranks):
        raise ValueError(f"modifier_rank is a rank from 0 to {ranks - 1}, or None, not {modifier_rank!r}")
    sharded = [parameter for parameter in wanted if comes_in_shards(parameter)]
    with contextlib.ExitStack() as left:
        first = _first_block(wanted, modifier_rank) if several else None
        if first is not None:
            left.callback(first.leave)
        block, handles = None, dict[int, Tensor]()
        if sharded:
            # Imported here: it imports torch's FSDP2, which takes a while.
            from longshore.stage3.fsdp import GatherBlock

            block = GatherBlock(sharded, modifier_rank is not None)
            left.callback(block.leave)
            handles = dict(zip(map(id, sharded), block.handles, strict=True))
        blocks = [each for each in (first, block) if each is not None]
        try:
            yield [handles.get(id(parameter), parameter) for parameter in wanted]
        except Exception as error:
            if blocks:
                with contextlib.suppress(Exception):  # the first error is the one to raise
                    _tell(f"{type(error).__name__}: {error}", [], first is not None)
            raise
        if blocks:
            _tell(None, [problem for each in blocks for problem in each.problems()], first is not None)
        if modifier_rank is not None:
            _write(first, block, modifier_rank)
    if modifier_rank is not None and several:
        done = {*map(id, sharded), *(map(id, first.parameters) if first is not None else ())}
        for tensor in wanted:
            if id(tensor) not in done:
                _broadcast(tensor, modifier_rank)


def _write(first: FirstBlock | None, block: GatherBlock | None, source: int) -> None:
    if block is not None:
        for whole in block.whole():
            _broadcast(whole.tensor, source)
        block.write()
    if first is not None:
        first.write(source)


def _first_block(wanted: Sequence[Tensor], modifier_rank: int | None) -> FirstBlock | None:
    """Give every rank the values of the parameters that are to be placed by ``initialize()``; None if there are none.

    With a writer all ranks meet anyway. Without one they meet only if they gather parameters that :class:`Init` made.
    """
    others = [each for each in wanted if not comes_in_shards(each)]
    if not others or (modifier_rank is None and all(unplaced(each) is None for each in others)):
        return None
    block = FirstBlock(others, modifier_rank is not None)
    return block if block.parameters else None


def comes_in_shards(parameter: Tensor) -> bool:
    """Return whether a tensor is a parameter that is sharded outside of :func:`gather`, whatever it is now."""
    fsdp = sys.modules.get("longshore.stage3.fsdp")  # if it was never imported, nothing of longshore is sharded
    return is_sharded(parameter) or (fsdp is not None and fsdp.is_member(parameter))


def _tell(failure: str | None, problems: list[str], first: bool) -> None:
    """Tell all ranks what became of the block on this one, and raise on all of them what was wrong on any; ``first``:
    parameters from before ``initialize()`` are among those of the block."""
    said = gather_from_all("leaving gather()", (failure, problems))
    kept = "all parameters keep their values from before"
    if first:
        kept = "parameters from before initialize() are what rank 0 made of its own, and others keep their values"
    for rank, (theirs, _) in enumerate(said):
        if theirs is not None:
            raise RankError(
                f"rank {rank} left gather() by an exception ({theirs}), and {kept}; look at the first error of any rank"
            )
    for rank, (_, wrong) in enumerate(said):
        if wrong:
            more = f" ({len(wrong) - 1} more parameters)" if len(wrong) > 1 else ""
            raise ParameterError(
                f"rank {rank}, inside gather(): {wrong[0]}{more}, so {kept}; "
                "write in place, and say which rank writes (modifier_rank)"
            )


@torch.no_grad()
def _broadcast(tensor: Tensor, source: int) -> None:
    send(tensor.detach(), source)
    # The write may be one that torch cannot see, and all ranks have to adopt it.
    if tensor.numel():
        torch.autograd.graph.increment_version(tensor)

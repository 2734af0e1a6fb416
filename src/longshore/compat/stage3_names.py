"""Attributes of DeepSpeed's stage 3 that other projects read: whether a parameter is whole and how large it is, and the
hooks that TRL removes to generate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from longshore.seam import Answer, Unplaced, comes_in_shards, is_sharded, present, unplaced


class ZeroParamStatus(Enum):
    """Whether a parameter can be used now; ``parameter.ds_status`` after ``initialize()`` at stage 3."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def _parameter_of(tensor: Tensor) -> Tensor | None:
    """Return the parameter that has to be gathered for its whole values: the shard of one that ``initialize()`` placed,
    whatever handle of it is given, or one that ``zero.Init`` made; None for other tensors."""
    if comes_in_shards(tensor):
        # Imported here: it imports torch's FSDP2, which has been imported if there are shards.
        from longshore.seam import sharded_of

        return sharded_of(tensor)
    return None if unplaced(tensor) is None else tensor


def _status(tensor: Tensor) -> ZeroParamStatus:
    record = unplaced(tensor)
    apart = tensor.is_meta if record is None else not record.digests
    apart = apart or is_sharded(present(tensor))
    return ZeroParamStatus.NOT_AVAILABLE if apart else ZeroParamStatus.AVAILABLE


_NUMBERS = WeakIdKeyDictionary()
"""``ds_id`` of each shard."""


def _number(tensor: Tensor) -> int:
    parameter = _parameter_of(tensor)
    record = None if parameter is None else unplaced(parameter)
    if parameter is None or (record is None and parameter not in _NUMBERS):
        raise AttributeError(f"{type(tensor).__name__!r} object has no attribute 'ds_id'; all of its values are here")
    return _NUMBERS[parameter] if record is None else record.number


def _shape(tensor: Tensor) -> torch.Size:
    return torch.Size(present(tensor).shape)


def _numel(tensor: Tensor) -> int:
    return present(tensor).numel()


_REFUSED = "ds_active_sub_modules ds_param_type ds_persist ds_process_group ds_secondary_tensor ds_summary ds_tensor"


def _refused(name: str) -> Callable[[Tensor], Any]:
    def refuse(tensor: Tensor) -> NoReturn:
        raise AttributeError(
            f"longshore has no parameter.{name}; use deepspeed.zero.GatheredParameters for whole values, and "
            "deepspeed.utils.safe_get_full_fp32_param and its like for masters and states"
        )

    return refuse


def show_status() -> None:
    """Give tensors ``ds_status``, ``ds_shape`` and ``ds_numel``, and those that have to be gathered ``ds_id``.

    By the class, since a parameter is one object while it is sharded and another while it is gathered.
    """
    found = {"ds_status": _status, "ds_shape": _shape, "ds_numel": _numel, "ds_id": _number}
    for name, read in {**found, **{name: _refused(name) for name in _REFUSED.split()}}.items():
        setattr(torch.Tensor, name, Answer(read))


def number(parameters: Iterable[Tensor]) -> None:
    """Give the shards of a model, in the same order on all ranks, the numbers that are their ``ds_id``."""
    for each in parameters:
        if is_sharded(each) and each not in _NUMBERS:
            _NUMBERS[each] = next(Unplaced.numbers)


def _nothing(*_: Any, **__: Any) -> Iterable[Any]:
    return ()


class ParameterOffload:
    """``engine.optimizer.parameter_offload``: the hooks by which stage 3 gathers, which TRL removes and puts back.

    DeepSpeed's would free those of ``GatheredParameters``, at the end of each module's forward. longshore's
    leave gathered parameters alone, so that there are none to remove, and no parameters to go through.
    """

    def __init__(self) -> None:
        self.module = SimpleNamespace(named_parameters=_nothing, ds_external_parameters=_nothing)
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: Any) -> None:
        """Put no hook back."""

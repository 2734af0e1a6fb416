"""What TRL reads of DeepSpeed's stage 3: whether a parameter is whole, and the hooks that it removes to generate."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from longshore.optim.shards import is_sharded


class ZeroParamStatus(Enum):
    """Whether a parameter can be used now; ``parameter.ds_status`` after ``initialize()`` at stage 3."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def _status(tensor: Tensor) -> ZeroParamStatus:
    return ZeroParamStatus.NOT_AVAILABLE if is_sharded(tensor) or tensor.is_meta else ZeroParamStatus.AVAILABLE


def show_status() -> None:
    """Give every tensor ``ds_status``.

    A property of the class, since a parameter is one object while it is sharded and another while it is gathered.
    """
    torch.Tensor.ds_status = property(_status)  # pyright: ignore[reportAttributeAccessIssue]


def _nothing(*_: Any, **__: Any) -> Iterable[Any]:
    return ()


class ParameterOffload:
    """``engine.optimizer.parameter_offload``: the hooks by which stage 3 gathers, which TRL removes and puts back.

    DeepSpeed's would free what ``GatheredParameters`` has gathered, at the end of each module's forward. longshore's
    leave gathered parameters alone, so that there are none to remove, and no parameters to go through.
    """

    def __init__(self) -> None:
        self.module = SimpleNamespace(named_parameters=_nothing, ds_external_parameters=_nothing)
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: Any) -> None:
        """Put no hook back."""

"""What a store is told of a step: parameters, rules and ranges; and the error of a state that a step left half way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from longshore.errors import BrokenStateError, CheckpointError
from longshore.kernels import HostRule, Scale
from longshore.layout import DimRange

MASTER = "master"
"""The first array of every buffer."""

GRADIENT = "gradient"
"""Stands for the window's gradient of a parameter where arrays of its state are read and written by name."""


def broken_state_error(failure: BaseException, where: str = "", on: str = "") -> BrokenStateError:
    """The error of a store whose last commit, or loading of a checkpoint, ended half way with ``failure``."""
    said = (
        f"an earlier step failed half way{where}, so some weights were stepped and others were not "
        f"({type(failure).__name__}: {failure}); load the model's weights and the optimizer's state "
        f"(load_state_dict){on} before going on"
    )
    if isinstance(failure, CheckpointError):
        said = f"a checkpoint was loaded in part only ({failure}); load a whole one{on} before going on"
    error = BrokenStateError(said)
    error.__cause__ = failure
    return error


class ParameterStep(NamedTuple):
    """One parameter that has a gradient in this window."""

    rule: HostRule
    target: Tensor
    """Takes the new values; flat, contiguous, on the device."""
    gradient: Tensor | None
    """Flat, contiguous, on the device; None: the store has it already."""


class Forecast(ABC):
    """What the next commit will be given, as far as is known during backward. A wrong one costs time, never bits."""

    @abstractmethod
    def scale(self) -> Scale:
        """What gradients will be multiplied by if they are not clipped."""

    @abstractmethod
    def rules(self) -> Mapping[int, HostRule]:
        """By parameter: how each of them would be stepped now."""


class OwnedRange(NamedTuple):
    """Elements ``[offset, offset + numel)`` of a parameter, flat, whose state this process keeps."""

    key: int
    """Their index in the store of this process's tiles."""
    offset: int
    numel: int
    tells: bool = True
    """Whether this process writes them to checkpoints, if several keep the same."""
    within: DimRange | None = None
    """The part of the parameter in which elements are counted, if tensor parallelism split it before it was sharded."""

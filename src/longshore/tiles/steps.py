"""Descriptions of a step for a store: parameters, rules and ranges; and the error of a step that failed half way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from longshore.errors import BrokenStateError, CheckpointError
from longshore.kernels import HostRule, Scale
from longshore.layout import DimRange

MASTER = "master"
"""Name of the first array of every buffer."""

GRADIENT = "gradient"
"""Name of the window's gradient of a parameter where the arrays of its state are read and written by name."""


def broken_state_error(failure: BaseException, where: str = "", on: str = "") -> BrokenStateError:
    """Return the error of a store whose last commit, or loading of a checkpoint, ended half way with ``failure``."""
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
    """Step of one parameter that has a gradient in this window."""

    rule: HostRule
    target: Tensor
    """Tensor for the new values; flat, contiguous, on the device."""
    gradient: Tensor | None
    """Flat, contiguous, on the device; None: the store has it already."""


class Forecast(ABC):
    """Arguments of the next commit, as far as known during backward. A wrong forecast costs time but changes no bit."""

    @abstractmethod
    def scale(self) -> Scale:
        """Return the scale of the gradients if they are not clipped."""

    @abstractmethod
    def rules(self) -> Mapping[int, HostRule]:
        """Return, by parameter, the rule by which it would be stepped now."""


class OwnedRange(NamedTuple):
    """Elements ``[offset, offset + numel)`` of a parameter, flat, whose state this process keeps."""

    key: int
    """Index of these elements in the store of this process's tiles."""
    offset: int
    numel: int
    writes: bool = True
    """Whether this process writes these elements to checkpoints, if several processes keep the same ones."""
    within: DimRange | None = None
    """The part of the parameter that ``offset`` counts in, if tensor parallelism split it before it was sharded."""

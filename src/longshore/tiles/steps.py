"""Descriptions of a step for a store: parameters and rules; and errors without the frames of their tracebacks."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from torch import Tensor

from longshore.errors import BrokenStateError
from longshore.kernels import HostRule, Scale

Failure = TypeVar("Failure", bound=BaseException)

MASTER = "master"
"""Name of the first array of every buffer."""

GRADIENT = "gradient"
"""Name of the window's gradient of a parameter where the arrays of its state are read and written by name."""


class Breakage(NamedTuple):
    """Why a state is broken, in words. The error itself would keep the store, with all its memory: its traceback refers
    to frames in which the store is a local variable."""

    reason: str
    loading: bool = False
    """Whether a checkpoint was being loaded, and not stepped."""

    @classmethod
    def by(cls, failure: BaseException) -> Breakage:
        """Return the record of the error of a step that ended half way."""
        return cls(f"{type(failure).__name__}: {failure}")


def broken_state_error(breakage: Breakage, where: str = "", on: str = "") -> BrokenStateError:
    """Return the error of a store whose last commit, or loading of a checkpoint, ended half way."""
    if breakage.loading:
        return BrokenStateError(
            f"a checkpoint was loaded in part only ({breakage.reason}); load a whole one{on} before going on"
        )
    return BrokenStateError(
        f"an earlier step failed half way{where}, so some weights were stepped and others were not "
        f"({breakage.reason}); load the model's weights and the optimizer's state (load_state_dict){on} before going on"
    )


class FailedThere(Exception):
    """The traceback of an error, as text: frames would keep all that is local to them, such as the store that keeps the
    error."""

    @classmethod
    def of(cls, failure: BaseException) -> FailedThere:
        """Return the traceback of ``failure``, and of its causes."""
        return cls("".join(traceback.format_exception(failure)))


def without_frames(failure: Failure) -> Failure:
    """Return an error that is raised nowhere at the moment, with its traceback, and that of its causes, as text."""
    text = FailedThere.of(failure)
    failure.__context__, failure.__cause__ = None, text
    return failure.with_traceback(None)


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

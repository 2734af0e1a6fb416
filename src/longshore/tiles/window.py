"""The accumulation window of one optimizer: all that happens between two steps that are applied, skipped or discarded.

It records, and never acts: whether the window can still be stepped, the factor of its gradients, how many arrived, and
how it ended. Gradients themselves are in tiles, in rounds, or in ``.grad``. Errors of a step that ended half way
are kept without the frames of their tracebacks.
"""

from __future__ import annotations

import contextlib
import copy
import math
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from longshore.errors import BrokenStateError, GradientError, LongshoreError
from longshore.kernels import Scale

Failure = TypeVar("Failure", bound=BaseException)


class Breakage(NamedTuple):
    """Why a state is broken, in words. The error itself would keep the store, with all its memory: its traceback refers
    to frames in which the store is a local variable."""

    reason: str
    loading: bool = False
    """Whether a checkpoint was being loaded, and not stepped."""
    shared: bool = False
    """Whether other ranks cannot step either; then each rank's state is broken, also where nothing was stepped."""

    @classmethod
    def by(cls, failure: BaseException, shared: bool = False) -> Breakage:
        """Return the record of the error of a step that ended half way."""
        return cls(f"{type(failure).__name__}: {failure}", shared=shared)

    def error(self) -> BrokenStateError:
        """Return the error of a call that needs the whole state."""
        on = " on every rank" if self.shared else ""
        if self.loading:
            return BrokenStateError(
                f"a checkpoint was loaded in part only ({self.reason}); load a whole one{on} before going on"
            )
        where = " on this or another rank" if self.shared else ""
        return BrokenStateError(
            f"an earlier step failed half way{where}, so some weights were stepped and others were not "
            f"({self.reason}); load the model's weights and the optimizer's state (load_state_dict){on} before going on"
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


class Ended(Enum):
    """How a window ended: its step was applied, or was due and skipped because of an overflow; its gradients were
    discarded, or with them the engine."""

    STEPPED = auto()
    SKIPPED = auto()
    DISCARDED = auto()
    CLOSED = auto()


class Entry(NamedTuple):
    """Counts of one parameter's gradients in a window."""

    arrived: int
    """Gradients that backward produced on this rank."""
    reduced: int | None
    """Gradients (sums over all ranks) that reached this rank's step; None if other ranks step the parameter."""
    applied: int
    """Steps made with these gradients."""


class Seen(NamedTuple):
    """A gradient at one moment: the parameter's name, the object in ``.grad``, a count that grows whenever the gradient
    changes, and the object that a script had put into ``.grad``, to which backwards were added that are on the host."""

    name: str
    gradient: weakref.ref[Tensor]
    changes: int
    added_to: weakref.ref[Tensor] | None = None


Fingerprint = Mapping[int, Seen]
"""The gradients of a window, by the parameter's index."""


class Window:
    """The accumulation window of one optimizer.

    Any thread may call :meth:`fail`, and write :attr:`arrived` in hooks; all else is for the thread that steps.

    Attributes:
        loss_scale, is_dynamic, overflowed: values of the optimizer's last ``set_loss_scale()``.
        entries: counts of the last window that was stepped, by parameter.
        arrived: how many gradients hooks took in this window, by parameter.
        gave_up: whether a backward of the window raised, and the other ranks are being told that the window ended.
        refused: whether this rank raised an error before it met the others for a step. It may mend the cause, and step.
        interrupted: whether a forward raised. This rank may run the batch again; if it discards the window, it skips a
            batch that the others may have stepped.
    """

    def __init__(self) -> None:
        self.loss_scale = 1.0
        self.is_dynamic = self.overflowed = False
        self.entries: Mapping[int, Entry] = {}
        self._at_end: list[weakref.WeakMethod[Callable[[Ended], None]]] = []
        self._begin()

    def _begin(self) -> None:
        self.gave_up = self.refused = self.interrupted = False
        self.lose_gradients()
        self._unclip()

    def lose_gradients(self) -> None:
        """Forget the gradients that arrived, and failed to: all parameters were replaced."""
        self.arrived: dict[int, int] = {}
        if not self.gave_up:
            self._failure: LongshoreError | None = None

    def _unclip(self) -> None:
        self._coefficient = 1.0
        self._measured: Fingerprint | None = None

    # -- whether it can be stepped --------------------------------------------

    def fail(self, failure: BaseException, event: str = "") -> None:
        """Note that the window cannot be stepped any more; the first failure counts. ``event`` says in words what could
        not be done, if the error does not."""
        if self.failed:
            return
        # Copies, here and in check(): a traceback would keep all that is local to its frames, as the window's owner.
        own, cause = None, failure
        if isinstance(failure, GradientError if event else LongshoreError):
            own, cause = copy.copy(failure), failure.__cause__
        if cause is not None and not isinstance(cause, FailedThere):
            cause = FailedThere.of(cause)
        if own is None:
            said = f"{event or 'this window failed in an earlier call'} ({type(failure).__name__}: {failure})"
            own = GradientError(f"{said}; zero_grad() discards this window, and training can go on")
        own.__cause__ = cause
        self._failure = self._failure or own

    @property
    def failed(self) -> bool:
        """Whether the window cannot be stepped any more."""
        return self._failure is not None

    def check(self) -> None:
        """Raise the first failure of the window, if there was one: a GradientError, or another error of ours."""
        if self._failure is not None:
            raise copy.copy(self._failure) from self._failure.__cause__

    @property
    def lost(self) -> bool:
        """Whether other ranks have to know that the window ended, if this rank discards it."""
        return self.failed or self.refused or self.interrupted

    @property
    def gradients_arrived(self) -> int:
        """Number of gradients that hooks took in this window."""
        return sum(self.arrived.values())

    # -- the factor of its gradients ------------------------------------------

    def clip(self, norm: Tensor, max_norm: float, measured: Fingerprint) -> None:
        """Set the coefficient ``max_norm / (norm + 1e-6)``, at most 1, as torch computes it, for these gradients.

        Raises:
            LongshoreError: the window is clipped already.
        """
        if self._coefficient != 1.0:
            raise LongshoreError("clip_grad_norm_ was already called in this window; call it once, before step()")
        self._coefficient = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        self._measured = measured

    def scale(self, now: Callable[[], Fingerprint]) -> Scale:
        """Return the factors for the gradients; ``now`` returns their present fingerprint.

        A coefficient is dropped when all gradients that it was measured on are gone (for example, discarded after a bad
        batch), as with torch's in-place clipping.

        Raises:
            GradientError: some gradients are as they were measured, and some are not.
        """
        kept, changed = False, []
        for index, (name, gradient, changes, added_to) in (now() if self._measured is not None else {}).items():
            tensor, measured = gradient(), (self._measured or {}).get(index)
            if measured is None or measured.gradient() is not tensor:
                changed.append(name)
                # With create_graph autograd adds into a new tensor, which includes what was measured.
                kept = kept or (measured is not None and tensor is not None and tensor.requires_grad)
                # A weak reference stays the same object, even if the tensor is gone.
                kept = kept or (measured is not None and measured.gradient is added_to)
            else:
                kept = True
                if measured.changes != changes:
                    changed.append(name)
        if changed and kept:
            raise GradientError(
                f"the gradient of parameter {changed[0]} changed after optimizer.clip_grad_norm_() had measured it; "
                "clip after the last backward, or call zero_grad() to discard this window"
            )
        if changed:
            self._unclip()
        return self._scale_with(self._coefficient)

    @property
    def unclipped(self) -> Scale:
        """The factors for gradients that are not clipped."""
        return self._scale_with(1.0)

    def _scale_with(self, coefficient: float) -> Scale:
        """Return the factors for unscaling and clipping, combined into one if that rounds like two."""
        unscale = 1.0 / self.loss_scale
        if math.frexp(unscale)[0] == 0.5:  # a power of two
            return Scale(unscale * coefficient)
        return Scale(unscale, coefficient)

    # -- its end --------------------------------------------------------------

    def balance(self, parameters: Iterable[tuple[int, str, int, int | None, int]]) -> dict[int, Entry]:
        """Return the counts of parameters before they are stepped, each with its index, name, number of elements,
        gradients that reached the step (None: it is stepped elsewhere), and steps that are about to be made.

        Raises LongshoreError if a gradient arrived and would not be applied.
        """
        entries = {}
        for index, name, numel, reduced, applied in parameters:
            arrived = self.arrived.get(index, 0)
            if arrived > 0 and (not applied or (reduced == 0 and numel > 0)):
                raise LongshoreError(
                    f"parameter {name}: {arrived} gradients arrived in this window, {reduced} reached the step, and "
                    f"{applied} steps would be made. Nothing was stepped. This is a bug in longshore: please report "
                    "it; zero_grad() discards the window"
                )
            entries[index] = Entry(arrived, reduced, applied)
        return entries

    def on_end(self, call: Callable[[Ended], None]) -> None:
        """Call a method of an object at each end from now on, before the window begins anew. The object is not kept
        alive."""
        self._at_end = [each for each in self._at_end if each() is not None]
        self._at_end.append(weakref.WeakMethod(call))

    def end(self, how: Ended) -> None:
        """End the window, and begin the next one, also if a call of :meth:`on_end` raises."""
        with contextlib.ExitStack() as ending:  # which calls the last one first
            ending.callback(self._begin)
            for each in reversed(self._at_end):
                if (call := each()) is not None:
                    ending.callback(call, how)

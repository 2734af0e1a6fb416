"""Counting of backwards: when the step of an accumulation window is due."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from longshore.accelerator import number_of
from longshore.engine.config.model import Config
from longshore.engine.wording import is_integer
from longshore.errors import GradientError, LongshoreError
from longshore.tiles import Ended, Window

_STEPS_OF_A_LOST_RUN = 3
"""Steps in a row with a loss that is not finite before a warning: one bad batch may be skipped."""
_DISCARDS_OF_A_LOOP = 3
"""Discarded windows before a warning: a bad batch is discarded once, but a loop that always discards never trains."""


@dataclass(frozen=True)
class BatchSizes:
    """Samples per backward on one rank, backwards per step, and ranks (a tensor-parallel group counts as one)."""

    micro_batch_size: int
    accumulation_steps: int
    world_size: int

    @classmethod
    def of(cls, config: Config) -> BatchSizes:
        """Return the sizes in a resolved configuration."""
        train, micro, steps = config.train_batch_size, config.micro_batch_size, config.gradient_accumulation_steps
        assert train is not None and micro is not None and steps is not None
        return cls(micro, steps, train // (micro * steps))

    @property
    def train_batch_size(self) -> int:
        return self.micro_batch_size * self.accumulation_steps * self.world_size

    def with_accumulation_steps(self, steps: int) -> BatchSizes:
        """Return the sizes with another number of backwards per step; ValueError if it is not at least 1."""
        if not is_integer(steps) or steps < 1:
            raise ValueError(f"gradient_accumulation_steps is a number of backwards, at least 1, not {steps!r}")
        return replace(self, accumulation_steps=steps)

    def with_micro_batch_size(self, micro_batch_size: int) -> BatchSizes:
        """Return the sizes with another number of samples per backward; ValueError if it is not at least 1."""
        if not is_integer(micro_batch_size) or micro_batch_size < 1:
            raise ValueError(f"the micro batch size is a number of samples, at least 1, not {micro_batch_size!r}")
        return replace(self, micro_batch_size=micro_batch_size)

    def steps_for(self, train_batch_size: int) -> int:
        """Return the number of accumulation steps that gives this train batch size.

        Raises:
            ValueError: the size is not a multiple of the samples of one backward on all ranks.
        """
        unit = self.micro_batch_size * self.world_size
        product = f"{unit} (micro batch {self.micro_batch_size} x {self.world_size} ranks)"
        if not is_integer(train_batch_size) or train_batch_size < unit:
            raise ValueError(f"train_batch_size is a multiple of {product}, not {train_batch_size!r}")
        if train_batch_size % unit:
            below = train_batch_size // unit * unit
            raise ValueError(
                f"train_batch_size {train_batch_size} is not a multiple of {product}; {below} and {below + unit} are"
            )
        return train_batch_size // unit


class LossError(ValueError, AssertionError):
    """An argument that is not a loss. It is an AssertionError too, since DeepSpeed asserts against it."""


def check_loss(loss: object, call: str) -> None:
    """Raise LossError unless ``loss``, an argument of the engine's ``call``, is a tensor of one element."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise LossError(f"engine.{call}() takes a loss of one element, not {found}; reduce it, with mean() say")


class Accumulation:
    """Counts of a script's calls since the last window of an engine ended."""

    def __init__(self, window: Window, sizes: BatchSizes, managed: bool = True) -> None:
        self._window = window
        self.sizes = sizes
        self.managed = managed
        """Whether backwards are counted; otherwise every ``step()`` is due."""
        self.boundary: bool | None = None
        """The boundary that the user declared last; None: none was declared, so backwards are counted."""
        self.discards = 0
        """Windows that were discarded since the last step that was due, as a loop does that never trains."""
        self._loss: Tensor | None = None
        """Sum of the losses of this window, not a number if one of them is not finite."""
        self._lost_steps = 0
        """Steps in a row whose losses were not finite."""
        self._begin()

    def _begin(self) -> None:
        self.backwards = 0
        """Calls of ``engine.backward()`` that raised nothing."""
        self.calls = 0
        """Calls of ``engine.step()`` that were not due."""
        self._failed = False
        """Whether an ``engine.backward()`` raised; the window has the error."""
        self.scaled = False
        """Whether the user asked for the loss scale, for a ``loss.backward()`` of their own."""
        self._loss = None
        self._raw = False
        """Whether gradients arrived outside of ``engine.backward()``."""
        self._arrived = 0
        """Gradients that had arrived when the last ``engine.backward()`` ended."""
        self._seen = 0
        """:attr:`backwards` at the last call of ``engine.step()``."""

    @property
    def _counts(self) -> bool:
        """Whether it depends on the number of backwards when a step is due."""
        return self.managed and self.boundary is None and self.sizes.accumulation_steps > 1

    @property
    def open(self) -> bool:
        """Whether anything was called since the last window ended that says when its step is due."""
        return self._failed or self.backwards > 0 or (self._counts and self.calls > 0)

    @property
    def alone(self) -> bool:
        """Whether an ``engine.step()`` that is called now has no ``engine.backward()`` before it, and needs one to be
        due: then another rank may have gradients of a ``loss.backward()`` that brought this one none."""
        return self._counts and not self._failed and self.backwards == self._seen

    # -- backwards ------------------------------------------------------------

    def next_is_last(self) -> bool:
        """Return whether the backward that is about to begin is the last of the window, as far as is known."""
        if self.boundary is not None or not self.managed:
            return bool(self.boundary)
        return max(self.calls, self.backwards) + 1 >= self.sizes.accumulation_steps

    def at_boundary(self) -> bool:
        """Return whether the backward that is under way, or has just ended, is the last of the window, as far as is
        known."""
        if self.boundary is not None or not self.managed:
            return bool(self.boundary)
        return max(self.calls + 1, self.backwards) >= self.sizes.accumulation_steps

    def declare(self, is_boundary: bool | None) -> None:
        """Declare whether the next ``step()`` is due, until declared otherwise; None: count backwards again.

        Raises:
            TypeError: ``is_boundary`` is something else.
            LongshoreError: every ``step()`` is due, as ``managed_accumulation`` is False.
        """
        if is_boundary is not None and not isinstance(is_boundary, bool):
            raise TypeError(f"a boundary is True, False or None, not {is_boundary!r}")
        if not self.managed:
            raise LongshoreError(
                "with managed_gradient_accumulation false, every step() applies, and no boundary can be declared; "
                "leave the call out, or set it to true (Accelerate and transformers' Trainer make this call)"
            )
        self.boundary = is_boundary

    def has_raw(self, arrived: int) -> bool:
        """Return whether some of the ``arrived`` gradients of this window came from a ``loss.backward()``. Call it
        outside of ``engine.backward()``."""
        self._raw = self._raw or arrived > self._arrived
        return self._raw

    def end_backward(self, loss: Tensor, arrived: int, succeeded: bool) -> None:
        """Count an ``engine.backward()``, after which ``arrived`` gradients have arrived in this window."""
        if type(loss) is Tensor:  # a DTensor would communicate
            value = loss.detach().reshape(()).float()
            if self._loss is not None:
                value = value + (self._loss - self._loss).to(value.device)
            self._loss = value
        self._arrived = arrived
        self.backwards += succeeded
        self._failed = self._failed or not succeeded

    # -- the step -------------------------------------------------------------

    def not_due(self) -> None:
        """Count a call of ``engine.step()`` that was not due."""
        self.calls += 1
        self._seen = self.backwards

    def due(self, raw: bool, loss_scale: float, others: Sequence[int] = ()) -> bool:
        """Return whether a ``step()`` is due; ``raw``: gradients arrived outside of ``engine.backward()``, and
        ``others`` are the ranks on which they did, as far as is known.

        Raises:
            LongshoreError: the number of backwards is unknown, because some were not the engine's.
            GradientError: these have no loss scale; or a backward of this window failed.
        """
        if self._failed:
            self._window.check()
        due = self._counted(raw, others)
        if due and raw and not self.scaled and loss_scale != 1.0:
            raise GradientError(
                f"gradients came from loss.backward() without the loss scale ({loss_scale:g}); "
                "call engine.backward(loss), or engine.scale(loss).backward()"
            )
        if due and self._loss is not None:
            # Before a step this waits for nothing: the step needs gradients.
            self._lost_steps = 0 if math.isfinite(number_of(self._loss)) else self._lost_steps + 1
        return due

    def end_step(self) -> None:
        """Note that a step was due, and is over; warn once in a run of steps whose losses are not finite."""
        self.discards = 0
        if self._lost_steps == _STEPS_OF_A_LOST_RUN:
            warnings.warn(
                f"the loss was not a finite number in {self._lost_steps} steps in a row. Their gradients are stepped "
                "as in plain PyTorch (with dynamic loss scaling, skipped), and training does not recover: look for the "
                "cause with torch.autograd.set_detect_anomaly(True), and go back to a checkpoint from before",
                stacklevel=4,
            )

    def _counted(self, raw: bool, others: Sequence[int]) -> bool:
        if self.boundary is not None:
            return self.boundary
        if not self._counts:
            return True
        if raw:
            raise LongshoreError(
                "gradients came from loss.backward(), which the engine does not count, and "
                f"gradient_accumulation_steps is {self.sizes.accumulation_steps}: call engine.backward(loss), or "
                "declare with engine.set_gradient_accumulation_boundary(True or False) which step() is to be applied"
            )
        if others:
            raise LongshoreError(
                f"rank {', '.join(map(str, others))} has gradients of a loss.backward(), which the engine does not "
                "count, and refused this step (see its own error), so no rank counts it; zero_grad() on every rank "
                "discards the window"
            )
        return self.backwards >= self.sizes.accumulation_steps

    def set_accumulation_steps(self, steps: int) -> None:
        """Change the backwards per step; the micro batch size stays, and the train batch size changes.

        Raises:
            ValueError: ``steps`` is not a number of backwards.
            LongshoreError: a window is under way.
        """
        sizes = self.sizes.with_accumulation_steps(steps)
        if sizes != self.sizes and self.open:
            raise LongshoreError(
                f"gradient_accumulation_steps was to change from {self.sizes.accumulation_steps} to {steps} in the "
                f"middle of a window ({self.backwards} backwards were scaled by the old number); change it right after "
                "a step that was applied, or discard the window with zero_grad()"
            )
        self.sizes = sizes

    # -- the end --------------------------------------------------------------

    def end(self, how: Ended) -> None:
        """Begin anew after a window that ended; warn about a loop that always discards, and so never trains."""
        kept, steps = self.backwards, self.sizes.accumulation_steps
        # A whole window is discarded once for a bad batch; a loop that goes on to step() has it in the wrong place.
        counted = how is Ended.DISCARDED and not self._failed and self.managed and self.boundary is None
        lost = counted and kept > 0 and (kept < steps or self.calls > 0)
        self.discards += lost
        self._begin()
        if lost and self.discards == _DISCARDS_OF_A_LOOP:
            warnings.warn(
                f"zero_grad() discarded {kept} of {steps} backwards of an accumulation window, and did so "
                f"{self.discards} times with no step() applied between; call it after a step() "
                "that was applied (engine.was_step_applied()), or leave it out: step() ends the window",
                stacklevel=_script_level(),
            )


def _script_level() -> int:
    """Return the ``stacklevel`` by which a warning of the caller names the line of the script that called longshore,
    perhaps by way of torch."""
    rooms = (f"{place}{os.sep}" for place in (Path(__file__).parents[1], Path(torch.__file__).parent))
    inside = (*rooms, contextlib.__file__)
    callers = inspect.stack(context=0)[1:]
    return next((level for level, each in enumerate(callers, 1) if not each.filename.startswith(inside)), 1)

"""The training loop, which yields its steps and validations, and the trace of a few of its steps (``--trace``)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import longshore
from longshore.cli.data import Sequences, TokenBatch
from longshore.cli.group import RunGroup
from longshore.cli.output import RunFolder, check_writable, save_file
from longshore.cli.settings import LoopSettings, OptimizerSettings
from longshore.cli.steppers import MemoryUse, TrainStepper
from longshore.cli.terminal import SettingsError, SharedError, plural, quantity
from longshore.seam import format_byte_size
from longshore.tracing import Trace

_OPTION = "--trace"
_TRACED = 3


@dataclass(frozen=True)
class Step:
    """A step that was made.

    Attributes:
        step: its number, from 1.
        loss: over all its backwards and ranks, before the step.
        lr: the learning rate, of the first group where groups have different ones.
        grad_norm: the norm before clipping; None without clipping, and if the loss scale skipped the step.
        seconds: spent training so far, without validations.
        memory: memory use of this rank.
        skipped: steps so far that an overflow under a dynamic loss scale skipped.
        lrs: the different learning rates of groups, if there are several.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    seconds: float
    memory: MemoryUse
    skipped: int = 0
    lrs: Sequence[float] = ()

    def state(self, tokens_per_second: float) -> str:
        """Return speed and memory in words."""
        return (
            f"{quantity(tokens_per_second)} tokens/s  "
            f"device {format_byte_size(self.memory.device)}  host {format_byte_size(self.memory.host)}"
        )

    def line(self, steps: int, loss: float, tokens_per_second: float) -> str:
        """Return a line of the log, of ``steps`` in all; ``loss`` is the mean since the last line."""
        norm = "" if self.grad_norm is None else f"  norm {self.grad_norm:.3f}"
        lrs = ", ".join(f"{each:.2e}" for each in self.lrs or (self.lr,))
        return (
            f"step {self.step:>{len(str(steps))}}/{steps}  loss {loss:.4f}  lr {lrs}{norm}  "
            f"{self.state(tokens_per_second)}"
        )


@dataclass(frozen=True)
class Validation:
    """The mean loss over the validation batches after ``step`` steps."""

    step: int
    loss: float


BEGIN = Step(0, math.nan, math.nan, None, 0.0, MemoryUse(0, 0))
"""Stands for the last step of a run that has made none."""


class Diverged(SharedError):
    """A loss or a gradient norm is NaN or infinite. The step was not applied."""

    def __init__(self, step: int, what: str, value: float, lr: float) -> None:
        super().__init__(
            f"the {what} is {value} at step {step}, so this step was not applied and the run stopped; "
            f"try a smaller --lr (it is {lr:.3g} there) or a longer --warmup"
        )
        self.step = step
        self.what = what
        self.value = value


def learning_rate(peak: float, settings: OptimizerSettings, step: int, steps: int) -> float:
    """Return the rate of step ``step`` (from 1) of a group whose highest is ``peak``: a linear rise over the warmup,
    then constant or down to nearly 0."""
    if step <= settings.warmup:
        return peak * step / settings.warmup
    if settings.schedule == "constant":
        return peak
    done = (step - 1 - settings.warmup) / (steps - settings.warmup)
    if settings.schedule == "linear":
        return peak * (1 - done)
    return peak * 0.5 * (1 + math.cos(math.pi * done))


class Loop:
    """Trains ``model`` on ``sequences``.

    With several ranks each has one batch in every backward: batch ``ranks * k + r`` of the order is rank ``r``'s in
    backward ``k``. So a step has the sequences that one process would have in ``ranks`` times as many backwards.

    Args:
        model: the model, or the engine around it.
        stop: whether to end now. It is called between steps and between validation batches, at the same places on
            all ranks, and returns the same on all.
        group: the ``loop.ranks`` ranks; None: this process alone.
    """

    def __init__(
        self,
        model: nn.Module,
        sequences: Sequences,
        stepper: TrainStepper,
        loop: LoopSettings,
        optimizer: OptimizerSettings,
        stop: Callable[[], bool] = lambda: False,
        group: RunGroup | None = None,
    ) -> None:
        self._group = RunGroup() if group is None else group
        assert loop.ranks == self._group.size
        self._model = model
        self._sequences = sequences
        self._stepper = stepper
        self.settings = loop
        self.optimizer = optimizer
        self._stop = stop
        self._device = stepper.device
        self._validation = sequences.validation_batches(loop.eval_batches, loop.batch_size) if loop.eval_every else []

    def run(
        self,
        around: Callable[[int], AbstractContextManager[object]] = nullcontext,
        after: Callable[[int], None] = lambda step: None,
        last: Step = BEGIN,
    ) -> Iterator[Step | Validation]:
        """Make all steps, or fewer if ``stop`` returns true.

        Args:
            around: given a step's number, from 1, returns a context that lasts from its first forward until it is
                applied.
            after: called with a step's number when the step and its validation have been yielded.
            last: the step after which the run continues.

        Raises:
            Diverged: a loss or a gradient norm is NaN or infinite.
        """
        if last is BEGIN:
            yield from self._validate(0)
        seconds, skipped = last.seconds, last.skipped
        for step in range(last.step + 1, self.settings.steps + 1):
            if self._stop():
                return
            start = time.perf_counter()
            with around(step):
                if self.optimizer.schedule is not None:
                    self._stepper.set_lr(lambda peak, at=step: self._learning_rate(peak, at))
                lr, *others = self._stepper.lrs
                loss = self._backward(step, lr)
                grad_norm, applied, overflow = self._stepper.step(self.optimizer.clip)
                if not applied and not overflow:
                    assert grad_norm is not None
                    raise Diverged(step, "gradient's norm", grad_norm, lr)
                skipped += overflow
                memory = self._stepper.memory()
                self._stepper.zero_grad()
            seconds += time.perf_counter() - start
            lrs = (lr, *others) if others else ()
            yield Step(step, loss, lr, None if overflow else grad_norm, seconds, memory, skipped, lrs)
            if self.settings.eval_every and (step % self.settings.eval_every == 0 or step == self.settings.steps):
                yield from self._validate(step)
            after(step)

    def _learning_rate(self, peak: float, step: int) -> float:
        return learning_rate(peak, self.optimizer, step, self.settings.steps)

    def _backward(self, step: int, lr: float) -> float:
        """Do the backwards of a step, and return its loss over all ranks, which is finite."""
        accumulation = self.settings.accumulation
        # In float64, so that it is the same number however many ranks share the batches.
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for micro in range(accumulation):
            index = ((step - 1) * accumulation + micro) * self._group.size + self._group.rank
            loss = self._loss(self._sequences.training_batch(index, self.settings.batch_size)) / accumulation
            self._stepper.backward(loss)
            total += loss.detach()
        value = self._group.sums([total.item()])[0] / self._group.size
        if not math.isfinite(value):
            raise Diverged(step, "loss", value, lr)
        return value

    def _loss(self, batch: TokenBatch) -> Tensor:
        """Return the mean cross entropy of the next token, in fp32."""
        output: Any = self._model(input_ids=batch.inputs.to(self._device), use_cache=False)
        logits = output.logits.float().flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch.targets.to(self._device).flatten())

    @torch.no_grad()
    def _validate(self, step: int) -> Iterator[Validation]:
        if not self._validation:
            return
        self._model.eval()
        # Each rank fills its own entries and leaves zeros elsewhere, so that summing over ranks rounds nothing.
        totals = [0.0] * len(self._validation)
        for start in range(0, len(self._validation), self._group.size):
            if self._stop():
                break
            own = start + self._group.rank
            # A rank that has none left repeats the last one: at stage 3 every forward needs all ranks.
            batch = self._validation[min(own, len(self._validation) - 1)]
            loss = self._loss(batch).item() * len(batch.inputs)
            if own < len(self._validation):
                totals[own] = loss
        else:
            rows = sum(len(batch.inputs) for batch in self._validation)
            yield Validation(step, sum(self._group.sums(totals)) / rows)
        self._model.train()


def traced_steps(loop: LoopSettings) -> range:
    """Return three steps in the middle of the run, or fewer, with no validation between them.

    The first step is avoided, since it allocates. A validation would be measured as part of the step after it.
    """
    for count in range(_TRACED, 0, -1):
        middle = (loop.steps - count) // 2 + 1
        for first in sorted(range(middle - _TRACED, middle + _TRACED + 1), key=lambda first: abs(first - middle)):
            steps = range(first, first + count)
            validated = loop.eval_every and any(step % loop.eval_every == 0 for step in steps[:-1])
            if first >= 2 and steps[-1] <= loop.steps and not validated:
                return steps
    return range(1, 2)


def check_trace(page: Path, folder: RunFolder | None) -> None:
    """Raise now the error that :meth:`StepTrace.save` would raise at the end; ``folder`` is that of ``--out``."""
    check_writable(page, _OPTION)
    beside = page.with_suffix(".json")
    if beside == page:
        raise SettingsError(f"{_OPTION} {page} is the page, and {beside.name} is for JSON beside it: name it .html")
    check_writable(beside, _OPTION)
    for path in (page, beside):
        if folder is not None and folder.needs(path):
            raise SettingsError(
                f"{_OPTION} {page} would be {path}, which the run in --out {folder.path} needs: choose another name"
            )


class StepTrace:
    """Traces the ``traced_steps`` of a loop that does each step in the context :meth:`around`.

    Args:
        page: the path of ``--trace``. JSON for Perfetto with the same events is written beside it.
        optimizer: one of longshore's.
    """

    def __init__(self, page: Path, optimizer: Any, loop: LoopSettings) -> None:
        self._page = page
        self._optimizer = optimizer
        self._steps = traced_steps(loop)
        self._block = ExitStack()
        self._trace: Trace | None = None

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Trace a step, if it is among the traced ones, while this context lasts; steps are counted from 1."""
        if step == self._steps[0]:
            self._trace = self._block.enter_context(longshore.trace(self._optimizer))
        try:
            yield
        except BaseException:
            self._block.close()
            raise
        if step == self._steps[-1]:
            self._block.close()

    def save(self) -> str:
        """Write both files after training, and return the summary.

        Raises:
            CommandError: a file cannot be written.
        """
        self._block.close()  # in case a signal ended the run within a traced step
        if self._trace is None:
            return f"nothing was traced: the run ended before step {self._steps[0]}"
        beside = self._page.with_suffix(".json")
        save_file(self._page, self._trace.save_html, _OPTION)
        save_file(beside, self._trace.save_chrome, _OPTION)
        summary = self._trace.summary()
        return (
            f"traced: {plural(summary.steps, 'step')} from step {self._steps[0]}, rank {self._trace.rank}\n{summary}\n"
            f"written to {self._page} and {beside}"
        )

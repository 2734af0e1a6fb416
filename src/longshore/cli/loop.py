"""The training loop. It yields what happened; who shows it, writes it or stops is not its concern."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longshore.cli.data import Batch, Sequences
from longshore.cli.failure import SharedError
from longshore.cli.optimizers import Memory, Stepper
from longshore.cli.settings import LoopSettings, OptimizerSettings
from longshore.cli.team import Team


@dataclass(frozen=True)
class Step:
    """An applied step. ``loss``: of its window, before it. ``seconds``: spent training so far, validation not
    counted. ``grad_norm``: before clipping; None without clipping, and where the loss scale skipped the step.
    ``skipped``: steps so far that an overflow under a dynamic loss scale skipped."""

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    seconds: float
    memory: Memory
    skipped: int = 0


@dataclass(frozen=True)
class Validation:
    """The mean loss over the validation batches after ``step`` steps."""

    step: int
    loss: float


class Diverged(SharedError):
    """A loss or a gradient that is no finite number. The step was not applied."""

    def __init__(self, step: int, what: str, value: float, lr: float) -> None:
        super().__init__(
            f"the {what} is {value} at step {step}, so this step was not applied and the run stopped; "
            f"try a smaller --lr (it is {lr:.3g} there) or a longer --warmup"
        )
        self.step = step
        self.what = what
        self.value = value


def learning_rate(settings: OptimizerSettings, step: int, steps: int) -> float:
    """The rate of step ``step`` (from 1): a linear rise over the warmup, then constant or down to nearly 0."""
    if step <= settings.warmup:
        return settings.lr * step / settings.warmup
    if settings.schedule == "constant":
        return settings.lr
    done = (step - 1 - settings.warmup) / (steps - settings.warmup)
    if settings.schedule == "linear":
        return settings.lr * (1 - done)
    return settings.lr * 0.5 * (1 + math.cos(math.pi * done))


class Loop:
    """Trains ``model`` on ``sequences``. ``stop`` is asked between steps and between validation batches.

    With several ranks each has one batch of every backward, and they meet in the same places: batch
    ``ranks * k + r`` of the one order is rank ``r``'s in backward ``k``. So a step has the sequences that one
    process would have in ``ranks`` times as many backwards.

    Args:
        model: what ``forward`` is called on: the model, or the engine.
        team: of ``loop.ranks`` ranks; None: this process alone.
        stop: asked at the same places on all ranks, and says the same on all.
    """

    def __init__(
        self,
        model: nn.Module,
        sequences: Sequences,
        stepper: Stepper,
        loop: LoopSettings,
        optimizer: OptimizerSettings,
        stop: Callable[[], bool] = lambda: False,
        team: Team | None = None,
    ) -> None:
        self._team = Team(None) if team is None else team
        assert loop.ranks == self._team.size
        self._model = model
        self._sequences = sequences
        self._stepper = stepper
        self._loop = loop
        self._optimizer = optimizer
        self._stop = stop
        self._device = next(model.parameters()).device
        self._validation = sequences.validation_batches(loop.eval_batches, loop.batch_size) if loop.eval_every else []

    def run(
        self,
        around: Callable[[int], AbstractContextManager[object]] = nullcontext,
        after: Callable[[int], None] = lambda step: None,
        last: Step | None = None,
    ) -> Iterator[Step | Validation]:
        """Raises ``Diverged``, ends early when ``stop`` says so, and otherwise makes all steps.

        Args:
            around: of the number of a step, from 1: a context for it, from its first forward until it was applied.
            after: called when all of a step, with its validation, was yielded.
            last: the step behind which the run goes on; None: it begins.
        """
        if last is None:
            yield from self._validate(0)
        done, seconds, skipped = (0, 0.0, 0) if last is None else (last.step, last.seconds, last.skipped)
        for step in range(done + 1, self._loop.steps + 1):
            if self._stop():
                return
            start = time.perf_counter()
            with around(step):
                if self._optimizer.schedule is not None:
                    self._stepper.set_lr(learning_rate(self._optimizer, step, self._loop.steps))
                lr = self._stepper.lr
                loss = self._backward(step, lr)
                grad_norm, applied, overflow = self._stepper.step(self._optimizer.clip)
                if not applied and not overflow:
                    assert grad_norm is not None
                    raise Diverged(step, "gradient's norm", grad_norm, lr)
                skipped += overflow
                memory = self._stepper.memory()
                self._stepper.zero_grad()
            seconds += time.perf_counter() - start
            yield Step(step, loss, lr, None if overflow else grad_norm, seconds, memory, skipped)
            if self._loop.eval_every and (step % self._loop.eval_every == 0 or step == self._loop.steps):
                yield from self._validate(step)
            after(step)

    def _backward(self, step: int, lr: float) -> float:
        """One window's backwards; its loss over all ranks, which is not NaN or infinite."""
        accumulation = self._loop.accumulation
        total = torch.zeros((), device=self._device)
        for micro in range(accumulation):
            index = ((step - 1) * accumulation + micro) * self._team.size + self._team.rank
            loss = self._loss(self._sequences.training_batch(index, self._loop.batch_size)) / accumulation
            self._stepper.backward(loss)
            total += loss.detach()
        value = self._team.mean(total.item())
        if not math.isfinite(value):
            raise Diverged(step, "loss", value, lr)
        return value

    def _loss(self, batch: Batch) -> Tensor:
        """The mean cross entropy of the next token, in fp32."""
        output: Any = self._model(input_ids=batch.inputs.to(self._device), use_cache=False)
        logits = output.logits.float().flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch.targets.to(self._device).flatten())

    @torch.no_grad()
    def _validate(self, step: int) -> Iterator[Validation]:
        if not self._validation:
            return
        self._model.eval()
        # Each rank has its own entries, and zeros elsewhere: their sum over ranks rounds nothing.
        totals = [0.0] * len(self._validation)
        for start in range(0, len(self._validation), self._team.size):
            if self._stop():
                break
            own = start + self._team.rank
            # A rank that has none left runs the last one too: at stage 3 every forward takes all ranks.
            batch = self._validation[min(own, len(self._validation) - 1)]
            loss = self._loss(batch).item() * len(batch.inputs)
            if own < len(self._validation):
                totals[own] = loss
        else:
            rows = sum(len(batch.inputs) for batch in self._validation)
            yield Validation(step, sum(self._team.sums(totals)) / rows)
        self._model.train()

"""The training loop. It yields what happened; who shows it, writes it or stops is not its concern."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longshore.cli.data import Batch, Sequences
from longshore.cli.failure import CommandError
from longshore.cli.optimizers import Memory, Stepper
from longshore.cli.settings import LoopSettings, OptimizerSettings


@dataclass(frozen=True)
class Step:
    """An applied step. ``loss``: of its window, before it. ``seconds``: spent training so far, validation not
    counted. ``grad_norm``: before clipping; None without clipping."""

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    seconds: float
    memory: Memory


@dataclass(frozen=True)
class Validation:
    """The mean loss over the validation batches after ``step`` steps."""

    step: int
    loss: float


class Diverged(CommandError):
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
    """Trains ``model`` on ``sequences``. ``stop`` is asked between steps and between validation batches."""

    def __init__(
        self,
        model: nn.Module,
        sequences: Sequences,
        stepper: Stepper,
        loop: LoopSettings,
        optimizer: OptimizerSettings,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._model = model
        self._sequences = sequences
        self._stepper = stepper
        self._loop = loop
        self._optimizer = optimizer
        self._stop = stop
        self._device = next(model.parameters()).device
        self._validation = sequences.validation_batches(loop.eval_batches, loop.batch_size) if loop.eval_every else []

    def run(self) -> Iterator[Step | Validation]:
        """Raises ``Diverged``, ends early when ``stop`` says so, and otherwise makes all steps."""
        yield from self._validate(0)
        seconds = 0.0
        for step in range(1, self._loop.steps + 1):
            if self._stop():
                return
            start = time.perf_counter()
            lr = learning_rate(self._optimizer, step, self._loop.steps)
            loss, grad_norm = self._backward(step, lr)
            self._stepper.set_lr(lr)
            self._stepper.step()
            memory = self._stepper.memory()
            self._stepper.zero_grad()
            seconds += time.perf_counter() - start
            yield Step(step, loss, lr, grad_norm, seconds, memory)
            if self._loop.eval_every and (step % self._loop.eval_every == 0 or step == self._loop.steps):
                yield from self._validate(step)

    def _backward(self, step: int, lr: float) -> tuple[float, float | None]:
        """One window's gradients, clipped; its loss and their norm. Neither is NaN or infinite."""
        accumulation = self._loop.accumulation
        total = torch.zeros((), device=self._device)
        for micro in range(accumulation):
            index = (step - 1) * accumulation + micro
            loss = self._loss(self._sequences.training_batch(index, self._loop.batch_size)) / accumulation
            loss.backward()
            total += loss.detach()
        value = total.item()
        if not math.isfinite(value):
            raise Diverged(step, "loss", value, lr)
        if not self._optimizer.clip:
            return value, None
        grad_norm = self._stepper.clip(self._optimizer.clip).item()
        if not math.isfinite(grad_norm):
            raise Diverged(step, "gradient's norm", grad_norm, lr)
        return value, grad_norm

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
        total, rows = 0.0, 0
        for batch in self._validation:
            if self._stop():
                break
            total += self._loss(batch).item() * len(batch.inputs)
            rows += len(batch.inputs)
        else:
            yield Validation(step, total / rows)
        self._model.train()

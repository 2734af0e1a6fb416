"""The line that rank 0 prints every so many steps."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from longshore.engine.config import Config


class StepLine:
    """Counts steps, adds up times where the configuration asks for them, and prints.

    Args:
        config: ``steps_per_print`` and ``wall_clock_breakdown``.
        rank: only rank 0 prints.
    """

    def __init__(self, config: Config, rank: int) -> None:
        self._every = config.steps_per_print if rank == 0 else None
        self._timed = config.wall_clock_breakdown and rank == 0
        self._seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Add the time of the block to ``part``. On CUDA the device's work is waited for, so this slows training."""
        if not self._timed:
            yield
            return
        _wait()
        start = time.perf_counter()
        try:
            yield
            _wait()
        finally:
            self._seconds[part] += time.perf_counter() - start

    def after_step(self, engine: Any) -> None:
        every = self._every
        if every is None or engine.global_steps % every:
            return
        rates = ", ".join(f"{rate:.4g}" for rate in engine.get_lr())
        line = f"step {engine.global_steps}, skipped {engine.skipped_steps}, lr {rates}"
        norm = engine.get_global_grad_norm()
        if norm is not None:
            line += f", gradient norm {norm:.4g}"
        if engine.loss_scale != 1.0:
            line += f", loss scale {engine.loss_scale:g}"
        for part, seconds in self._seconds.items():
            line += f", {part} {1e3 * seconds / every:.1f} ms"
        self._seconds.clear()
        print(line, flush=True)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()

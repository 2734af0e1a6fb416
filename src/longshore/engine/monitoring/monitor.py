"""What an engine's steps are told to: rank 0's writers, or nobody."""

from __future__ import annotations

import importlib.util
import logging
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longshore.engine.config import Config
from longshore.engine.monitoring.meter import Meter
from longshore.engine.monitoring.writers import CsvWriter, TensorBoardWriter, WandbWriter, Writer

if TYPE_CHECKING:
    from longshore.engine.engine import Engine

_log = logging.getLogger(__name__)


class NoMonitor:
    """Nobody looks, and nothing is measured."""

    def backward(self, loss: Tensor) -> None:
        """A loss of the window, as the user gave it."""

    def stepping(self) -> AbstractContextManager[None]:
        """Around what a step does between backward and the return of ``step()``."""
        return nullcontext()

    def stepped(self, engine: Engine) -> None:
        """A step was applied or skipped."""

    def discarded(self) -> None:
        """The window ended without a step of the engine's."""

    def close(self) -> None:
        """No more steps come."""


class Monitor(NoMonitor):
    """Measures this rank's steps, and tells ``writers``.

    A writer that fails is left out from then on, with a warning: training goes on.

    Args:
        writers: made already.
        meter: told by the store.
    """

    def __init__(self, writers: Sequence[Writer], meter: Meter) -> None:
        self._writers = list(writers)
        self._meter = meter
        # Of one window.
        self._losses: list[Tensor] = []
        self._exposed_s = 0.0
        # Of the whole run.
        self._last = time.perf_counter()

    def backward(self, loss: Tensor) -> None:
        self._losses.append(loss.detach())

    @contextmanager
    def stepping(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._exposed_s = time.perf_counter() - begin

    def discarded(self) -> None:
        self._losses.clear()

    def stepped(self, engine: Engine) -> None:
        values = self._values(engine)
        self._losses.clear()
        for writer in list(self._writers):
            try:
                writer.write(engine.global_samples, values)
            except Exception as error:
                self._writers.remove(writer)
                _log.warning(
                    "%s failed (%s: %s) and gets no more numbers; training goes on",
                    writer.name,
                    type(error).__name__,
                    error,
                )

    def _values(self, engine: Engine) -> dict[str, float | None]:
        """By the names that DeepSpeed gives the first three; None is a number that there is not."""
        now = time.perf_counter()
        step_s, self._last = now - self._last, now
        lanes, norm = self._meter.take(), engine.get_global_grad_norm()
        loss = float(torch.stack([each.float().reshape(()) for each in self._losses]).mean()) if self._losses else None
        rates = engine.get_lr()
        return {
            "Train/Samples/train_loss": loss,
            "Train/Samples/lr": rates[0] if rates else None,
            "Train/Samples/loss_scale": engine.loss_scale,
            "Train/Samples/grad_norm": norm,
            "Train/Samples/skipped_steps": engine.skipped_steps,
            "Time/step_s": step_s,
            "Time/exposed_s": self._exposed_s,
            "Bandwidth/host_bytes_per_s": lanes.host_bytes_per_second,
            "Bandwidth/to_host_bytes_per_s": lanes.gradient_bytes / step_s,
            "Bandwidth/to_device_bytes_per_s": lanes.parameter_bytes / step_s,
            "Speculation/hit_rate": lanes.hit_rate,
            "Memory/host_bytes": sum(engine.optimizer.host_bytes().values()),
            "Memory/process_bytes": _process_bytes(),
            "Memory/device_bytes": _device_bytes(engine.device),
        }

    def close(self) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            try:
                writer.close()
            except Exception as error:
                _log.warning("%s could not end its files: %s: %s", writer.name, type(error).__name__, error)


def check_installed(config: Config) -> None:
    """Raises ImportError where a library that the configuration asks for is not there."""
    for section, module in (("tensorboard", "tensorboard"), ("wandb", "wandb")):
        if getattr(config, section) is not None and importlib.util.find_spec(module) is None:
            raise ImportError(
                f"the configuration enables {section}, and {module} is not installed: pip install {module}, or set "
                f"{section}.enabled to false"
            )


def monitor_for(config: Config, rank: int, add_recorder: Callable[[Any], None]) -> NoMonitor:
    """What the configuration asks for, on rank 0."""
    if rank != 0:
        return NoMonitor()
    makers: list[tuple[Callable[[Any], Writer], Any]] = [
        (TensorBoardWriter, config.tensorboard),
        (WandbWriter, config.wandb),
        (CsvWriter, config.csv_monitor),
    ]
    writers = [make(section) for make, section in makers if section is not None]
    if not writers:
        return NoMonitor()
    meter = Meter()
    add_recorder(meter)
    return Monitor(writers, meter)


def _process_bytes() -> int:
    """Memory that this process has now."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _device_bytes(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None

"""Reports of a run's steps: the line that rank 0 prints, and the numbers that it writes for TensorBoard and the like.

Measuring changes no bit. Where the configuration asks for nothing, there is no object here, and nothing is measured.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import itertools
import logging
import os
import resource
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

import torch
from torch import Tensor

from longshore.engine.config import Config
from longshore.engine.config.model import CsvConfig, TensorBoardConfig, WandbConfig
from longshore.engine.ranks import Ranks
from longshore.host import Recorder
from longshore.host.events import DROPPED, KEPT, REDONE
from longshore.kernels import TileSegment
from longshore.optim.host_optimizer import HostOptimizer
from longshore.transfer import CopyHandle

_log = logging.getLogger(__name__)


class StepFigures(NamedTuple):
    """Figures of a step that was applied or skipped.

    ``rates`` are those of the step, one for each parameter group, and not of the next one. ``exposed_s`` is the time
    that training waited in ``step()``.
    """

    number: int
    skipped: int
    samples: int
    rates: list[float]
    norm: float | None
    loss_scale: float
    exposed_s: float


class Reports:
    """Reports the steps of rank 0, as a printed line and as numbers for writers.

    A writer that fails is left out from then on, with a warning: training goes on.

    Args:
        config: with ``wall_clock_breakdown`` the line has the times of forward, backward and step. On CUDA they wait
            for the device, which slows training.
        writers: what writes the numbers.
        optimizer: the engine's, whose store and memory are measured for writers.
        device: of this rank.
    """

    def __init__(
        self, config: Config, writers: Sequence[Writer], optimizer: HostOptimizer, device: torch.device
    ) -> None:
        self._every = config.steps_per_print
        self._timed = config.wall_clock_breakdown and self._every is not None
        self._writers = list(writers)
        self._optimizer = optimizer
        self._device = device
        self._meter = Meter()
        if writers:
            store = optimizer._core.store
            store.set_recorders((*store.recorders, self._meter))
        self._seconds: dict[str, float] = defaultdict(float)
        """Time of forward, backward and step since the last line."""
        self._losses: list[Tensor] = []
        """Losses of the window, as the user gave them."""
        self._last = time.perf_counter()

    @classmethod
    def wanted(cls, config: Config, ranks: Ranks, optimizer: HostOptimizer) -> Reports | None:
        """Return the reports that the configuration asks for, on rank 0."""
        if ranks.rank != 0:
            return None
        writers: list[Writer] = []
        if config.tensorboard is not None:
            writers.append(TensorBoardWriter(config.tensorboard))
        if config.wandb is not None:
            writers.append(WandbWriter(config.wandb))
        if config.csv_monitor is not None:
            writers.append(CsvWriter(config.csv_monitor))
        return cls(config, writers, optimizer, ranks.device) if writers or config.steps_per_print is not None else None

    @contextlib.contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Add the time of the block to ``part``."""
        if not self._timed:
            yield
            return
        wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        wait()
        start = time.perf_counter()
        try:
            yield
            wait()
        finally:
            self._seconds[part] += time.perf_counter() - start

    def add_loss(self, loss: Tensor) -> None:
        """Take a loss of the window, as the user gave it."""
        if self._writers:
            self._losses.append(loss.detach())

    def discard(self) -> None:
        """Forget the losses of a window that the engine did not step."""
        self._losses.clear()

    def due(self, number: int) -> bool:
        """Whether :meth:`step` would report this step."""
        return bool(self._writers) or (self._every is not None and number % self._every == 0)

    def step(self, step: StepFigures) -> None:
        """Report a step that was applied or skipped."""
        if self._every is not None and step.number % self._every == 0:
            self._print(step, self._every)
        if self._writers:
            self._write(step)

    def _print(self, step: StepFigures, every: int) -> None:
        rates = ", ".join(f"{rate:.4g}" for rate in step.rates)
        line = f"step {step.number}, skipped {step.skipped}, lr {rates}"
        if step.norm is not None:
            line += f", gradient norm {step.norm:.4g}"
        if step.loss_scale != 1.0:
            line += f", loss scale {step.loss_scale:g}"
        for part, seconds in self._seconds.items():
            line += f", {part} {1e3 * seconds / every:.1f} ms"
        self._seconds.clear()
        print(line, flush=True)

    def _write(self, step: StepFigures) -> None:
        values = self._values(step)
        self._losses.clear()
        for writer in list(self._writers):
            try:
                writer.write(step.samples, values)
            except Exception as error:
                self._writers.remove(writer)
                what = f"{writer.name} failed ({type(error).__name__}: {error})"
                _log.warning("%s and gets no more numbers; training goes on", what)

    def _values(self, step: StepFigures) -> dict[str, float | None]:
        """Name the numbers, the first three as DeepSpeed does; None stands for a number that does not exist."""
        now = time.perf_counter()
        step_s, self._last = now - self._last, now
        loss = float(torch.stack([each.float().reshape(()) for each in self._losses]).mean()) if self._losses else None
        cuda = self._device.type == "cuda"
        return {
            "Train/Samples/train_loss": loss,
            "Train/Samples/lr": step.rates[0] if step.rates else None,
            "Train/Samples/loss_scale": step.loss_scale,
            "Train/Samples/grad_norm": step.norm,
            "Train/Samples/skipped_steps": step.skipped,
            "Time/step_s": step_s,
            "Time/exposed_s": step.exposed_s,
            **self._meter.take(step_s),
            "Memory/host_bytes": sum(self._optimizer.host_bytes().values()),
            "Memory/process_bytes": _process_bytes(),
            "Memory/device_bytes": torch.cuda.memory_allocated(self._device) if cuda else None,
        }

    def close(self) -> None:
        """End the writers' files."""
        writers, self._writers = self._writers, []
        for writer in writers:
            try:
                writer.close()
            except Exception as error:
                _log.warning("%s could not end its files: %s: %s", writer.name, type(error).__name__, error)


class Meter(Recorder):
    """Adds up what a store tells its recorder, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._pass_ns = 0
        self._pass_bytes = 0
        self._copied = {"copy to host": 0, "publish": 0}
        self._verdicts = {KEPT: 0, REDONE: 0, DROPPED: 0}

    def take(self, step_s: float) -> dict[str, float | None]:
        """Return what was counted since the last call, ``step_s`` seconds ago; None where nothing was.

        Bytes of state per second count the time in which a pass over it ran; the hit rate is the share of tiles
        stepped ahead, and decided on, that were kept.
        """
        with self._lock:
            decided = sum(self._verdicts.values())
            figures = {
                "Bandwidth/host_bytes_per_s": 1e9 * self._pass_bytes / max(1, self._pass_ns)
                if self._pass_bytes
                else None,
                "Bandwidth/to_host_bytes_per_s": self._copied["copy to host"] / step_s,
                "Bandwidth/to_device_bytes_per_s": self._copied["publish"] / step_s,
                "Speculation/hit_rate": self._verdicts[KEPT] / decided if decided else None,
            }
            self._clear()
        return figures

    def begin(self, name: str, tile: int | None) -> int:
        return time.perf_counter_ns()

    def mark(self, name: str, tile: int | None) -> None:
        if name in self._verdicts:
            with self._lock:
                self._verdicts[name] += 1

    def span(self, name: str, tile: int | None, begin_ns: int) -> None:
        return

    def passed(self, name: str, tile: int, page: Tensor, rows: Sequence[TileSegment], begin_ns: int) -> None:
        if page.device.type != "cpu":  # a kernel that was only enqueued: its time is not known
            return
        took_ns = time.perf_counter_ns() - begin_ns
        num_bytes = 2 * page.shape[0] * page.element_size() * sum(row.gradient.numel() for row in rows)
        with self._lock:
            self._pass_ns += took_ns
            self._pass_bytes += num_bytes

    def copying(self, name: str, tile: int, handle: CopyHandle, begin_ns: int) -> None:
        target = handle.target
        with self._lock:
            self._copied[name] += target.numel() * target.element_size()


def _process_bytes() -> int:
    """Resident memory of this process."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# -- writers -----------------------------------------------------------------------


def check_installed(config: Config) -> None:
    """Raise ImportError where a library that the configuration asks for is not installed."""
    for section, module in (("tensorboard", "tensorboard"), ("wandb", "wandb")):
        if getattr(config, section) is not None and importlib.util.find_spec(module) is None:
            raise ImportError(
                f"the configuration enables {section}, and {module} is not installed: pip install {module}, or set "
                f"{section}.enabled to false"
            )


class Writer(ABC):
    """Writes the numbers of one step at a time, in order."""

    name: str

    @abstractmethod
    def write(self, samples: int, values: Mapping[str, float | None]) -> None:
        """Write ``values`` after ``samples`` samples of training; may raise whatever the library raises."""

    @abstractmethod
    def close(self) -> None:
        """End the files."""


class TensorBoardWriter(Writer):
    name = "tensorboard"

    def __init__(self, config: TensorBoardConfig) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(Path(config.output_path) / config.job_name))

    def write(self, samples: int, values: Mapping[str, float | None]) -> None:
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, samples)

    def close(self) -> None:
        self._writer.close()


class WandbWriter(Writer):
    """Logs to the active run of wandb; without one it starts, and ends, a run of its own."""

    name = "wandb"

    def __init__(self, config: WandbConfig) -> None:
        import wandb

        self._wandb = wandb
        self._own = wandb.run is None
        if self._own:
            wandb.init(project=config.project, entity=config.team, group=config.group)

    def write(self, samples: int, values: Mapping[str, float | None]) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        self._wandb.log({**known, "Train/Samples": samples})

    def close(self) -> None:
        if self._own:
            self._wandb.finish()


class CsvWriter(Writer):
    """Writes one row per step; a run that is resumed appends to the file of before."""

    name = "csv_monitor"

    def __init__(self, config: CsvConfig) -> None:
        self._path = Path(config.output_path) / config.job_name / "metrics.csv"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"csv_monitor cannot write to {self._path}: {error.strerror}; give a folder as csv_monitor.output_path"
            ) from error
        # Set with the first row.
        self._columns: list[str] = []
        self._file: TextIO | None = None

    def write(self, samples: int, values: Mapping[str, float | None]) -> None:
        row = {"samples": samples, **values}
        if self._file is None:
            self._columns = list(row)
            self._file = self._opened(self._columns)
        csv.writer(self._file).writerow([row.get(column) for column in self._columns])
        self._file.flush()

    def _opened(self, columns: list[str]) -> TextIO:
        """Open the file for appending; one with other columns is renamed first, to a name with a number."""
        begins = not self._path.exists()
        if not begins:
            with open(self._path, newline="") as former:
                begins = next(csv.reader(former), None) != columns
            if begins:
                names = (self._path.with_name(f"metrics.{number}.csv") for number in itertools.count(1))
                self._path.rename(next(name for name in names if not name.exists()))
        file = open(self._path, "a", newline="")  # noqa: SIM115  (closed by close())
        if begins:
            csv.writer(file).writerow(columns)
        return file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

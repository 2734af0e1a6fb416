"""Reports of a run's steps: the line that rank 0 prints, and the numbers that it writes for TensorBoard, wandb or CSV.

Measuring does not change results. If the configuration asks for no report, nothing is measured.
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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor, nn

from longshore.accelerator import Stopwatch, accelerator_type
from longshore.engine.config.model import Config, CsvConfig, TensorBoardConfig, WandbConfig
from longshore.engine.flops import FlopsProfiler
from longshore.engine.ranks import Ranks
from longshore.kernels import Buffer, TileSegment, element_bytes
from longshore.optim.tiled_optimizer import TiledOptimizer, core_of
from longshore.tiles import Recorder
from longshore.tiles.events import COPY_TO_HOST, DROPPED, KEPT, PUBLISH, REDONE
from longshore.transfer import Copy

_log = logging.getLogger(__name__)


class StepFigures(NamedTuple):
    """Figures of a step that was applied or skipped.

    Attributes:
        number: number of the step.
        rates: learning rates of this step (not of the next one), one for each parameter group.
        norm: norm of the gradients, before clipping; None if none was measured.
        exposed_s: seconds that training waited in ``step()``: on a device, from the end of its backward until its next
            forward may begin.
    """

    number: int
    skipped: int
    samples: int
    rates: list[float]
    norm: float | None
    loss_scale: float
    exposed_s: float


class Reports:
    """Reports steps on rank 0, as a printed line and as numbers for writers; see :func:`reports_of`.

    A writer that cannot start, or fails, is dropped with a warning, and training goes on. With ``wall_clock_breakdown``
    the line has the times of forward, backward and step; on CUDA, measuring them waits for the device, which slows
    training.
    """

    def __init__(self, config: Config, model: nn.Module, optimizer: TiledOptimizer, device: torch.device) -> None:
        self._every = config.steps_per_print
        self._timed = config.wall_clock_breakdown and self._every is not None
        sections = {name: getattr(config, name) for name in _WRITERS}
        self._writers = _started({name: section for name, section in sections.items() if section is not None})
        profiler = config.flops_profiler
        self._profiler = None if profiler is None else FlopsProfiler(profiler, model)
        self._optimizer = optimizer
        self._device = device
        self._meter = Meter()
        if self._writers:
            store = core_of(optimizer).members.store
            store.set_recorders((*store.tiles.recorders, self._meter))
        self._seconds: dict[str, float] = defaultdict(float)
        """Seconds in forward, in backward and in step since the last line."""
        self._losses: list[Tensor] = []
        """Losses of the window, as the user gave them."""
        self._last = time.perf_counter()
        self._samples = 0
        """Samples up to the last step that was reported."""
        self._begun = False
        """Whether a step was reported: an engine that goes on from a checkpoint has not those before."""

    @contextlib.contextmanager
    def timing(self, part: str, steps: int) -> Iterator[None]:
        """Add the time of the block to the total of ``part``, in the window that follows ``steps`` steps."""
        wait = torch.accelerator.synchronize if accelerator_type() else lambda: None
        profiler = self._profiler
        if profiler is not None and profiler.profiles(steps) and torch.is_grad_enabled():
            with profiler.measuring(part, wait), self._timing_line(part, wait):
                yield
        else:
            with self._timing_line(part, wait):
                yield

    @contextlib.contextmanager
    def _timing_line(self, part: str, wait: Callable[[], None]) -> Iterator[None]:
        if not self._timed:
            yield
            return
        wait()
        start = time.perf_counter()
        try:
            yield
            wait()
        finally:
            self._seconds[part] += time.perf_counter() - start

    def add_loss(self, loss: Tensor) -> None:
        """Keep a loss of the window, as the user gave it, for the mean."""
        if self._writers:
            self._losses.append(loss.detach())

    def discard(self) -> None:
        """Forget the losses of a window that the engine did not step."""
        self._losses.clear()
        if self._profiler is not None:
            self._profiler.discard()

    def stopwatch(self) -> Stopwatch:
        """Return a stopwatch for a step, which runs where training waits; nothing is measured for the line alone."""
        return Stopwatch(self._device if self._writers else torch.device("cpu"))

    def step(self, figures: StepFigures) -> None:
        """Report a step."""
        if self._every is not None and figures.number % self._every == 0:
            self._print(figures, self._every)
        before, self._samples = self._samples if figures.number == 1 or self._begun else None, figures.samples
        self._begun = True
        if self._profiler is not None:
            self._profiler.stepped(figures.number)
        if self._profiler is not None and self._profiler.profiles(figures.number - 1):
            self._profiler.report(figures.number, None if before is None else figures.samples - before)
        values = self._values(figures) if self._writers else {}
        for name, writer in list(self._writers.items()):
            try:
                writer.write(figures.samples, values)
            except Exception as error:
                del self._writers[name]
                what = f"{name} failed ({type(error).__name__}: {error})"
                _log.warning("%s and gets no more numbers; training goes on", what)

    def _print(self, figures: StepFigures, every: int) -> None:
        rates = ", ".join(f"{rate:.4g}" for rate in figures.rates)
        line = f"step {figures.number}, skipped {figures.skipped}, lr {rates}"
        if figures.norm is not None:
            line += f", gradient norm {figures.norm:.4g}"
        if figures.loss_scale != 1.0:
            line += f", loss scale {figures.loss_scale:g}"
        for part, seconds in self._seconds.items():
            line += f", {part} {1e3 * seconds / every:.1f} ms"
        self._seconds.clear()
        print(line, flush=True)

    def _values(self, figures: StepFigures) -> dict[str, float | None]:
        """Return the numbers by name (the first three names are DeepSpeed's); None for a number that does not exist."""
        now = time.perf_counter()
        step_s, self._last = now - self._last, now
        loss = float(torch.stack([each.float().reshape(()) for each in self._losses]).mean()) if self._losses else None
        self._losses.clear()
        device = None if self._device.type == "cpu" else torch.get_device_module(self._device)
        return {
            "Train/Samples/train_loss": loss,
            "Train/Samples/lr": figures.rates[0] if figures.rates else None,
            "Train/Samples/loss_scale": figures.loss_scale,
            "Train/Samples/grad_norm": figures.norm,
            "Train/Samples/skipped_steps": figures.skipped,
            "Time/step_s": step_s,
            "Time/exposed_s": figures.exposed_s,
            **self._meter.take(step_s),
            "Memory/host_bytes": sum(self._optimizer.host_bytes().values()),
            "Memory/process_bytes": _process_bytes(),
            "Memory/device_bytes": None if device is None else device.memory_allocated(self._device),
        }

    def close(self) -> None:
        """Close the writers' files."""
        if self._profiler is not None:
            self._profiler.close()
        writers, self._writers = self._writers, {}
        for name, writer in writers.items():
            try:
                writer.close()
            except Exception as error:
                _log.warning("%s could not end its files: %s: %s", name, type(error).__name__, error)


class Meter(Recorder):
    """A recorder that adds up a store's events, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        """Events and copied bytes by the event's name; time and bytes of passes over state on the host."""

    def take(self, step_s: float) -> dict[str, float | None]:
        """Return the figures since the last call, ``step_s`` seconds ago; None for a figure without events.

        Bytes of state per second are over the time of passes alone; the hit rate is the share of tiles stepped ahead,
        among those with a verdict, that were kept.
        """
        with self._lock:
            counts, self._counts = self._counts, Counter()
        decided = counts[KEPT] + counts[REDONE] + counts[DROPPED]
        return {
            "Bandwidth/host_bytes_per_s": 1e9 * counts["pass bytes"] / max(1, counts["pass ns"]) or None,
            "Bandwidth/to_host_bytes_per_s": counts[COPY_TO_HOST] / step_s,
            "Bandwidth/to_device_bytes_per_s": counts[PUBLISH] / step_s,
            "Speculation/hit_rate": counts[KEPT] / decided if decided else None,
        }

    def begin(self, name: str, tile: int | None) -> int:
        return time.perf_counter_ns()

    def mark(self, name: str, tile: int | None) -> None:
        self._add({name: 1})

    def span(self, name: str, tile: int | None, begin_ns: int) -> None:
        return

    def passed(self, name: str, tile: int, buffer: Buffer, rows: Sequence[TileSegment], begin_ns: int) -> None:
        if buffer.device.type == "cpu":  # otherwise a kernel was only enqueued, and its time is not known
            took_ns = time.perf_counter_ns() - begin_ns
            num_bytes = round(2 * element_bytes(buffer) * sum(row.gradient.numel() for row in rows))
            self._add({"pass ns": took_ns, "pass bytes": num_bytes})

    def copying(self, name: str, tile: int | None, handle: Copy, begin_ns: int) -> None:
        self._add({name: handle.num_bytes})

    def _add(self, counts: Mapping[str, int]) -> None:
        with self._lock:
            self._counts.update(counts)


def _process_bytes() -> int:
    """Return the bytes of resident memory of this process."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# -- writers -----------------------------------------------------------------------
#
# A writer's write(samples, values) receives the numbers of one step, after training on ``samples`` samples; steps come
# in order. It may raise any error of its library.


class TensorBoardWriter:
    def __init__(self, config: TensorBoardConfig) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(Path(config.output_path) / config.job_name))
        self.close = self._writer.close

    def write(self, samples: int, values: Mapping[str, float | None]) -> None:
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, samples)


class WandbWriter:
    """Logs to the active run of wandb; if there is none, it starts a run and ends it."""

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


class CsvWriter:
    """Writes one row per step; a run that is resumed appends to the existing file."""

    def __init__(self, config: CsvConfig) -> None:
        self._path = Path(config.output_path) / config.job_name / "metrics.csv"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"csv_monitor cannot write to {self._path}: {error.strerror}; give a folder as csv_monitor.output_path"
            ) from error
        self._file: TextIO | None = None  # opened for the first row

    def write(self, samples: int, values: Mapping[str, float | None]) -> None:
        row = {"samples": samples, **values}
        if self._file is None:
            self._file = self._opened(list(row))
        csv.writer(self._file).writerow(row.values())
        self._file.flush()

    def _opened(self, columns: list[str]) -> TextIO:
        """Open the file for appending; a file with other columns, or a link, is first renamed to a numbered name."""
        taken = os.path.lexists(self._path)
        begins = not taken or self._path.is_symlink()
        if not begins:
            with open(self._path, newline="") as former:
                begins = next(csv.reader(former), None) != columns
        if begins and taken:
            names = (self._path.with_name(f"metrics.{number}.csv") for number in itertools.count(1))
            self._path.rename(next(name for name in names if not os.path.lexists(name)))

        def unlinked(path: str, flags: int) -> int:
            return os.open(path, flags | os.O_NOFOLLOW, 0o666)

        file = open(self._path, "a", newline="", opener=unlinked)  # noqa: SIM115  (closed by close())
        if begins:
            csv.writer(file).writerow(columns)
        return file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


_WRITERS: dict[str, Any] = {"tensorboard": TensorBoardWriter, "wandb": WandbWriter, "csv_monitor": CsvWriter}
"""Classes of writers, by the section of the configuration that enables them."""


def _started(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the writers of these sections of the configuration, without those that cannot start."""
    writers: dict[str, Any] = {}
    for name, section in sections.items():
        try:
            writers[name] = _WRITERS[name](section)
        except Exception as error:
            what = f"{name} cannot start ({type(error).__name__}: {error})"
            _log.warning("%s and gets no numbers; training goes on", what)
    return writers


def check_installed(config: Config) -> None:
    """Raise ImportError if a library that the configuration asks for is not installed."""
    for name in ("tensorboard", "wandb"):
        if getattr(config, name) is not None and importlib.util.find_spec(name) is None:
            raise ImportError(
                f"the configuration enables {name}, and {name} is not installed: pip install {name}, or set "
                f"{name}.enabled to false"
            )


def reports_of(config: Config, ranks: Ranks, model: nn.Module, optimizer: TiledOptimizer) -> Reports | None:
    """Return the reports that the configuration asks for on rank 0; None if there are none, and on other ranks."""
    asking = ("steps_per_print", "flops_profiler", *_WRITERS)
    wanted = any(getattr(config, name) is not None for name in asking)
    return Reports(config, model, optimizer, ranks.device) if wanted and ranks.rank == 0 else None

"""The runs that the demo compares."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from longshore.cli import curve
from longshore.cli.failure import CommandError
from longshore.cli.loop import Loop, Step
from longshore.cli.output import METRICS, WEIGHTS
from longshore.cli.settings import DemoSettings, LoopSettings, OptimizerSettings
from longshore.cli.steppers import MemoryUse
from longshore.cli.terminal import quantity

RANKS = 2
_POLL_S = 0.1
_END_S = 40.0  # torchrun itself grants its ranks 30


class Contestant(ABC):
    """One run and its results so far."""

    def __init__(self, name: str, loop: LoopSettings, optimizer: OptimizerSettings) -> None:
        self.name = name
        self.loop = loop
        self.optimizer = optimizer
        self.steps: list[Step] = []
        self.validation_loss = math.nan

    @abstractmethod
    def run(self) -> Iterator[Step]:
        """Do the run, and yield its steps."""

    @property
    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """The weights by name, after the run."""

    @property
    def seconds_per_step(self) -> float:
        """The median over the steps."""
        ends = [0.0] + [step.seconds for step in self.steps]
        return statistics.median(end - start for start, end in itertools.pairwise(ends))

    @property
    def clipped(self) -> int:
        """The number of steps whose gradient norm was above the limit."""
        return sum(step.grad_norm is not None and step.grad_norm > self.optimizer.clip for step in self.steps)

    def row(self) -> list[str]:
        """Return the cells of the run in the table."""
        last, numel = self.steps[-1], sum(weight.numel() for weight in self.weights.values())
        memory = [f"{count / numel:.2f}" for count in last.memory]
        speed = quantity(self.loop.tokens_per_step / self.seconds_per_step)
        return [self.name, f"{last.loss:.6f}", f"{self.validation_loss:.6f}", *memory, speed]

    def series(self) -> curve.Series:
        steps, losses = [step.step for step in self.steps], [step.loss for step in self.steps]
        if self.optimizer.plain:
            return curve.Series(self.name, steps, losses, width=5, alpha=0.35)
        return curve.Series(self.name, steps, losses, width=1.2)


class LocalContestant(Contestant):
    """A run in this process."""

    def __init__(self, name: str, network: nn.Module, loop: Loop) -> None:
        super().__init__(name, loop.settings, loop.optimizer)
        self._network = network
        self._loop = loop

    def run(self) -> Iterator[Step]:
        for event in self._loop.run():
            if isinstance(event, Step):
                self.steps.append(event)
                yield event
            else:
                self.validation_loss = event.loss

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._network.named_parameters()}


class RanksContestant(Contestant):
    """``torchrun -m longshore train --stage N`` on two ranks, each with every second batch.

    Args:
        stage: the stage of ZeRO.
        settings: have the size of the model, and the data.
        loop: the loop of one process with ``RANKS`` backwards in a step.
        threads: torch's threads in each rank. Sums in backward depend on their number.
    """

    def __init__(
        self, stage: int, settings: DemoSettings, loop: LoopSettings, optimizer: OptimizerSettings, threads: int
    ) -> None:
        super().__init__(f"fp32, {RANKS} ranks, ZeRO-{stage}", loop, optimizer)
        self._stage = stage
        assert loop.accumulation == RANKS
        names = ("steps", "seq_len", "batch_size", "seed", "eval_every", "eval_batches")
        self._options: dict[str, Any] = {name.replace("_", "-"): getattr(loop, name) for name in names}
        self._options |= {"size": settings.size, "warmup": optimizer.warmup, "log-every": 1}
        self._data = settings.data
        self._threads = threads
        self._weights: dict[str, Tensor] = {}

    @property
    def weights(self) -> dict[str, Tensor]:
        return self._weights

    def run(self) -> Iterator[Step]:
        with tempfile.TemporaryDirectory(prefix="longshore-demo-") as folder:
            out = Path(folder, "run")
            yield from self._train(out)
            self._load(out)

    def _train(self, out: Path, *further: str) -> Iterator[Step]:
        """Run the command to its end, with the options ``further``."""
        errors = out.with_suffix(".stderr")
        with errors.open("wb") as stderr:
            # In its own process session, so that a Ctrl-C reaches it once, from here.
            process = subprocess.Popen(
                [*self._command(out), *further],
                env={**os.environ, "OMP_NUM_THREADS": str(self._threads), "CUDA_VISIBLE_DEVICES": ""},
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        try:
            yield from self._follow(process, out / METRICS)
        finally:
            _end(process)
        if process.returncode != 0:
            raise CommandError(f"the run on {RANKS} ranks failed: {_reason(errors)}")

    def _load(self, out: Path) -> None:
        from safetensors.torch import load_file

        self._weights = load_file(out / WEIGHTS)

    def _command(self, out: Path) -> list[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "-m", "longshore"]
        options = [part for name, value in self._options.items() for part in (f"--{name}", str(value))]
        data = [part for path in self._data for part in ("--data", str(path))]
        return [sys.executable, *launcher, "train", "--stage", str(self._stage), *options, *data, "--out", str(out)]

    def _follow(self, process: subprocess.Popen[bytes], metrics: Path) -> Iterator[Step]:
        """Yield what the run writes to its metrics, until it has ended."""
        done = 0
        while True:
            ended = process.poll() is not None
            lines = metrics.read_bytes().split(b"\n")[:-1] if metrics.exists() else []
            for line in lines[done:]:
                entry = json.loads(line)
                if entry["kind"] == "train":
                    self.steps.append(_step(entry))
                    self._trained(process)
                    yield self.steps[-1]
                elif entry["kind"] == "validation":
                    self.validation_loss = entry["loss"]
            done = len(lines)
            if ended:
                return
            time.sleep(_POLL_S)

    def _trained(self, process: subprocess.Popen[bytes]) -> None:
        """Called after each step."""


class KilledContestant(RanksContestant):
    """A run with checkpoints. One rank is killed half way, and the same command with ``--resume`` continues the run."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.name = f"fp32, ZeRO-{self._stage}, resumed"
        steps = self._options["steps"]
        self._save_every = max(1, steps // 5)
        self._kill_at = max(self._save_every + 1, steps // 2)
        self._killed_by = ""
        self.story = "the run ended before it could be killed"
        """What happened to it, in words."""

    def run(self) -> Iterator[Step]:
        with tempfile.TemporaryDirectory(prefix="longshore-demo-") as folder:
            out = Path(folder, "run")
            saving = ("--save-every", str(self._save_every))
            try:
                yield from self._train(out, *saving)
            except CommandError:
                if not self._killed_by:
                    raise
                seen, self.steps = self.steps, []
                (out / METRICS).unlink()  # of the run that was killed
                yield from self._train(out, *saving, "--resume")
                # Its own steps tell: a checkpoint may be whole, and used, before "latest" names it.
                behind = self.steps[0].step - 1 if self.steps else len(seen)
                self.steps[:0] = seen[:behind]
                self.story = f"{self._killed_by} after step {len(seen)}, and --resume continued after step {behind}"
            self._load(out)

    def _trained(self, process: subprocess.Popen[bytes]) -> None:
        if self._killed_by or self.steps[-1].step < self._kill_at or process.poll() is not None:
            return
        ranks = _children_of(process.pid)
        if ranks:
            self._killed_by = "SIGKILL for rank 0"
            with contextlib.suppress(ProcessLookupError):
                os.kill(ranks[0], signal.SIGKILL)
        else:  # no /proc here
            self._killed_by = "SIGTERM"
            process.terminate()


def _children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _step(entry: dict[str, Any]) -> Step:
    memory = MemoryUse(entry["device_bytes"], entry["host_bytes"])
    return Step(entry["step"], entry["loss"], entry["lr"], entry["grad_norm"], entry["seconds"], memory)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _reason(errors: Path) -> str:
    """Return the line that longshore printed, or else the last line."""
    lines = errors.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
    ours = [line for line in lines if line.startswith("longshore: ")]
    return ours[0].removeprefix("longshore: ") if ours else lines[-1]

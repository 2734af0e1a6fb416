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

import torch
from torch import Tensor, nn

from longshore.cli import curve
from longshore.cli.data import Sequences
from longshore.cli.failure import CommandError
from longshore.cli.loop import Loop, Step
from longshore.cli.optimizers import Memory, Stepper
from longshore.cli.output import METRICS, WEIGHTS
from longshore.cli.settings import LoopSettings, OptimizerSettings

RANKS = 2
_POLL_S = 0.1
_END_S = 40.0  # torchrun itself grants its ranks 30


class Contestant(ABC):
    """One run and what came out so far.

    Args:
        name: for the table.
        optimizer: how it steps.
        ours: whether it is longshore's.
    """

    def __init__(self, name: str, optimizer: OptimizerSettings, ours: bool) -> None:
        self.name = name
        self.optimizer = optimizer
        self._ours = ours
        self.steps: list[Step] = []
        self.validation_loss = math.nan

    @abstractmethod
    def run(self) -> Iterator[Step | None]:
        """One item a step, or None for a validation."""

    @property
    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """By name, after the run."""

    @property
    def numel(self) -> int:
        return sum(weight.numel() for weight in self.weights.values())

    @property
    def seconds_per_step(self) -> float:
        """The median."""
        ends = [0.0] + [step.seconds for step in self.steps]
        return statistics.median(end - start for start, end in itertools.pairwise(ends))

    @property
    def clipped(self) -> int:
        """Steps whose gradient was really clipped."""
        return sum(step.grad_norm is not None and step.grad_norm > self.optimizer.clip for step in self.steps)

    def series(self) -> curve.Series:
        series = curve.Series(self.name, width=1.2 if self._ours else 5, alpha=1.0 if self._ours else 0.35)
        for step in self.steps:
            series.add(step.step, step.loss)
        return series


class LocalContestant(Contestant):
    """A run in this process."""

    def __init__(
        self,
        name: str,
        network: nn.Module,
        stepper: Stepper,
        loop: LoopSettings,
        optimizer: OptimizerSettings,
        sequences: Sequences,
    ) -> None:
        super().__init__(name, optimizer, optimizer.offload)
        self.model = network
        self._loop = Loop(network, sequences, stepper, loop, optimizer)

    def run(self) -> Iterator[Step | None]:
        for event in self._loop.run():
            if isinstance(event, Step):
                self.steps.append(event)
                yield event
            else:
                self.validation_loss = event.loss
                yield None

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}


class RanksContestant(Contestant):
    """``torchrun -m longshore train --stage N`` on two ranks, each with every second batch.

    Args:
        stage: of ZeRO.
        loop: of one process with ``RANKS`` backwards a step.
        size: of the model.
        data: paths; none for the default text.
        threads: torch's, of each rank. Sums in backward depend on it.
    """

    def __init__(
        self,
        stage: int,
        loop: LoopSettings,
        optimizer: OptimizerSettings,
        size: str,
        data: tuple[Path, ...],
        threads: int,
    ) -> None:
        super().__init__(f"fp32, {RANKS} ranks, ZeRO-{stage}", optimizer, ours=True)
        self._stage = stage
        assert loop.accumulation == RANKS
        self._options: dict[str, Any] = {
            "size": size,
            "steps": loop.steps,
            "seq-len": loop.seq_len,
            "batch-size": loop.batch_size,
            "seed": loop.seed,
            "warmup": optimizer.warmup,
            "eval-every": loop.eval_every,
            "eval-batches": loop.eval_batches,
            "log-every": 1,
        }
        self._data = data
        self._threads = threads
        self._weights: dict[str, Tensor] = {}

    @property
    def weights(self) -> dict[str, Tensor]:
        return self._weights

    def run(self) -> Iterator[Step | None]:
        with tempfile.TemporaryDirectory(prefix="longshore-demo-") as folder:
            out = Path(folder, "run")
            yield from self._train(out)
            self._load(out)

    def _train(self, out: Path, *further: str) -> Iterator[Step | None]:
        """One command, to its end; ``further`` are options of it."""
        errors = out.with_suffix(".stderr")
        with errors.open("wb") as stderr:
            # In a session of its own, so that a Ctrl-C reaches it once, from here.
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

    def _follow(self, process: subprocess.Popen[bytes], metrics: Path) -> Iterator[Step | None]:
        """What the run wrote so far, until it has ended."""
        done = 0
        while True:
            ended = process.poll() is not None
            lines = metrics.read_bytes().split(b"\n")[:-1] if metrics.exists() else []
            for line in lines[done:]:
                record = json.loads(line)
                if record["kind"] == "train":
                    self.steps.append(_step(record))
                    self._trained(process)
                    yield self.steps[-1]
                elif record["kind"] == "validation":
                    self.validation_loss = record["loss"]
                    yield None
            done = len(lines)
            if ended:
                return
            time.sleep(_POLL_S)

    def _trained(self, process: subprocess.Popen[bytes]) -> None:
        """A step was made."""


class KilledContestant(RanksContestant):
    """The same with checkpoints: one rank is killed half way, and the same command goes on with ``--resume``."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.name = f"fp32, ZeRO-{self._stage}, resumed"
        steps = self._options["steps"]
        self._save_every = max(1, steps // 5)
        self._kill_at = max(self._save_every + 1, steps // 2)
        self._killed_by = ""
        self.story = "the run that was to be killed ended before it was"
        """What became of it, in words."""

    def run(self) -> Iterator[Step | None]:
        with tempfile.TemporaryDirectory(prefix="longshore-demo-") as folder:
            out = Path(folder, "run")
            saving = ("--save-every", str(self._save_every))
            try:
                yield from self._train(out, *saving)
            except CommandError:
                if not self._killed_by:
                    raise
                seen, self.steps = self.steps, []
                (out / METRICS).unlink()  # of the first life
                yield from self._train(out, *saving, "--resume")
                # From its own steps: a checkpoint may be whole, and used, before "latest" names it.
                behind = self.steps[0].step - 1 if self.steps else len(seen)
                self.steps[:0] = seen[:behind]
                self.story = f"{self._killed_by} after step {len(seen)}, and --resume went on after step {behind}"
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


def _step(record: dict[str, Any]) -> Step:
    memory = Memory(record["device_bytes"], record["host_bytes"])
    return Step(record["step"], record["loss"], record["lr"], record["grad_norm"], record["seconds"], memory)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _reason(errors: Path) -> str:
    """The line that longshore left, or the last one."""
    lines = errors.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
    ours = [line for line in lines if line.startswith("longshore: ")]
    return ours[0].removeprefix("longshore: ") if ours else lines[-1]


def set_threads(threads: int) -> int:
    """torch's, from here on; returns what it was."""
    former = torch.get_num_threads()
    torch.set_num_threads(threads)
    return former

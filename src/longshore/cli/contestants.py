"""The runs that ``longshore demo`` compares: in this process, and on ranks of their own."""

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

from longshore.cli.loop import Loop, Step
from longshore.cli.output import METRICS, WEIGHTS
from longshore.cli.settings import DemoSettings, LoopSettings, OptimizerSettings
from longshore.cli.steppers import MemoryUse
from longshore.cli.terminal import CommandError, quantity

RANKS = 2
_POLL_S = 0.1
_END_S = 40.0  # torchrun itself grants its ranks 30


class Contestant(ABC):
    """One of the runs that the demo compares, and its results so far."""

    def __init__(self, name: str, loop: LoopSettings, optimizer: OptimizerSettings) -> None:
        self.name = name
        self.loop = loop
        self.optimizer = optimizer
        self.steps: list[Step] = []
        self.validation_loss = math.nan
        self.weights: dict[str, Tensor] = {}
        """The weights by name, after the run."""

    @abstractmethod
    def run(self) -> Iterator[Step]:
        """Do the run, and yield its steps."""

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
        self.weights = {name: parameter.detach() for name, parameter in self._network.named_parameters()}


class RanksContestant(Contestant):
    """``torchrun -m longshore train --stage N`` on two ranks, each with every second batch.

    Args:
        stage: the stage of ZeRO.
        settings: the size of the model, and the data.
        loop: the loop of one process with ``RANKS`` backwards in a step.
        threads: torch's threads in each rank. Sums in backward depend on their number.
        killed: whether to save checkpoints, kill one rank half way, and continue with ``--resume``.
    """

    def __init__(
        self,
        stage: int,
        settings: DemoSettings,
        loop: LoopSettings,
        optimizer: OptimizerSettings,
        threads: int,
        killed: bool = False,
    ) -> None:
        name = f"fp32, ZeRO-{stage}, resumed" if killed else f"fp32, {RANKS} ranks, ZeRO-{stage}"
        super().__init__(name, loop, optimizer)
        assert loop.accumulation == RANKS
        names = ("steps", "seq_len", "batch_size", "seed", "eval_every", "eval_batches")
        self._options: dict[str, Any] = {name.replace("_", "-"): getattr(loop, name) for name in names}
        self._options |= {"stage": stage, "size": settings.size, "warmup": optimizer.warmup, "log-every": 1}
        self._data = settings.data
        self._threads = threads
        self._kill_at = math.inf
        if killed:
            self._options["save-every"] = max(1, loop.steps // 5)
            self._kill_at = max(self._options["save-every"] + 1, loop.steps // 2)
        self._killed_by = ""
        self.story = "the run ended before it could be killed" if killed else ""
        """What happened to a run that was to be killed."""

    def run(self) -> Iterator[Step]:
        from safetensors.torch import load_file

        with tempfile.TemporaryDirectory(prefix="longshore-demo-") as folder:
            out = Path(folder, "run")
            try:
                yield from self._train(out)
            except CommandError:
                if not self._killed_by:
                    raise
                seen, self.steps = self.steps, []
                (out / METRICS).unlink()  # metrics of the run that was killed
                yield from self._train(out, "--resume")
                # The resumed run's steps say where it began: it may use a checkpoint that "latest" does not name.
                behind = self.steps[0].step - 1 if self.steps else len(seen)
                self.steps[:0] = seen[:behind]
                self.story = f"{self._killed_by} after step {len(seen)}, and --resume continued after step {behind}"
            self.weights = load_file(out / WEIGHTS)

    def _train(self, out: Path, *further: str) -> Iterator[Step]:
        """Run the command to its end, with the options ``further``."""
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "-m", "longshore"]
        options = [word for name, value in self._options.items() for word in (f"--{name}", str(value))]
        data = [word for path in self._data for word in ("--data", str(path))]
        errors = out.with_suffix(".stderr")
        with errors.open("wb") as stderr:
            # In its own process session, so that a Ctrl-C reaches it once, from here.
            process = subprocess.Popen(
                [sys.executable, *launcher, "train", *options, *data, "--out", str(out), *further],
                env={**os.environ, "OMP_NUM_THREADS": str(self._threads), "CUDA_VISIBLE_DEVICES": ""},
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        try:
            yield from self._follow(process, out / METRICS)
        finally:
            process.terminate()  # unless it has ended
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.returncode != 0:
            # Report the line that longshore printed, or else the last line.
            lines = errors.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
            ours = [line.removeprefix("longshore: ") for line in lines if line.startswith("longshore: ")]
            raise CommandError(f"the run on {RANKS} ranks failed: {[*ours, lines[-1]][0]}")

    def _follow(self, process: subprocess.Popen[bytes], metrics: Path) -> Iterator[Step]:
        """Yield the steps that the run writes to its metrics, until it has ended."""
        done = 0
        while True:
            ended = process.poll() is not None
            lines = metrics.read_bytes().split(b"\n")[:-1] if metrics.exists() else []
            for entry in map(json.loads, lines[done:]):
                if entry["kind"] == "train":
                    values = {name: entry[name] for name in ("step", "loss", "lr", "grad_norm", "seconds")}
                    self.steps.append(Step(**values, memory=MemoryUse(entry["device_bytes"], entry["host_bytes"])))
                    if entry["step"] >= self._kill_at and not self._killed_by and process.poll() is None:
                        self._kill(process)
                    yield self.steps[-1]
                elif entry["kind"] == "validation":
                    self.validation_loss = entry["loss"]
            done = len(lines)
            if ended:
                return
            time.sleep(_POLL_S)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        try:
            ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        except OSError:  # no /proc here
            ranks = []
        if ranks:
            self._killed_by = "SIGKILL for rank 0"
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(ranks[0]), signal.SIGKILL)
        else:
            self._killed_by = "SIGTERM"
            process.terminate()

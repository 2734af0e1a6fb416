"""The runs of ``longshore demo`` on the CPU, with longshore and without it, in pairs, and a table of them."""

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
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn

from longshore.cli import model
from longshore.cli.data import Corpus, Sequences, read_text
from longshore.cli.loop import Loop, Step
from longshore.cli.output import METRICS, WEIGHTS, Series, check_writable, load_figure, loss_curves, save_file
from longshore.cli.settings import NUMEL_MULTIPLE, SIZES, DemoSettings, LoopSettings, ModelSettings, OptimizerSettings
from longshore.cli.steppers import MemoryUse, PlainStepper, make_stepper
from longshore.cli.terminal import CommandError, make_console, plural, progress_bar, quantity, warn

RANKS = 2
_EVAL_BATCHES = 8
_TRIAL_STEPS = 3  # for --seconds; the median leaves out the first, which warms up
_DTYPES = ("fp32", "bf16")
_STAGES = (1, 2, 3)
_KILLED = (2,)
"""Stages with a second run, which is killed and resumed."""
# The time of all runs on ranks, in units of the plain run on half the threads: 1 for that run itself, and 0.5 for
# each run that trains on the same tokens with all threads.
_RANKS_SHARE = 1.0 + 0.5 * len((*_STAGES, *_KILLED))
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

    def series(self) -> Series:
        steps, losses = [step.step for step in self.steps], [step.loss for step in self.steps]
        width, alpha = (5.0, 0.35) if self.optimizer.plain else (1.2, 1.0)
        return Series(self.name, steps, losses, width, alpha)


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


class Pair(NamedTuple):
    """Two runs that should have equal weights at the end."""

    what: str
    ours: Contestant
    plain: Contestant


def run(settings: DemoSettings) -> int:
    """Return 0 if every weight of every run equals its plain counterpart, else 1."""
    if settings.out is not None:
        check_writable(settings.out, "--out")
        load_figure()
    text = read_text(settings.data, None)
    model.load_transformers()
    corpus = model.make_corpus(text.documents, None)
    demo = _Demo(settings, corpus)
    if settings.seconds is not None:
        demo.choose_steps(settings.seconds)
    demo.say(
        f"{text.source}: {plural(len(text.documents), 'file')}, {quantity(corpus.tokens.numel())} tokens\n"
        f"a Llama of size {settings.size}, {plural(demo.steps, 'step')} of {RANKS} x {settings.batch_size} x "
        f"{settings.seq_len} tokens, clipped to norm {OptimizerSettings.clip}, "
        f"{plural(torch.get_num_threads(), 'thread')}"
    )
    pairs = [demo.race(dtype) for dtype in _DTYPES]
    if settings.two_ranks:
        pairs += demo.race_of_ranks()
    return demo.report(pairs)


class _Demo:
    """The runs and their report. All of them train on the tokens of ``corpus``."""

    def __init__(self, settings: DemoSettings, corpus: Corpus) -> None:
        self.steps = settings.steps
        self._settings = settings
        self._corpus = corpus
        self._sequences = Sequences(corpus, settings.seq_len, settings.seed)
        self._console = make_console()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def choose_steps(self, seconds: float) -> None:
        """Choose the number of steps with which all runs together take ``seconds``, by timing a few steps."""

        def trial(contestant: Contestant) -> float:
            list(contestant.run())
            return contestant.seconds_per_step

        self.steps = _TRIAL_STEPS
        taken = sum(trial(self._local(dtype, plain)) for dtype in _DTYPES for plain in (False, True))
        if self._settings.two_ranks:
            with _fewer_threads():
                taken += _RANKS_SHARE * trial(self._local("fp32", plain=True, exact_norm=True))
        self.steps = max(1, int(seconds / taken))

    def race(self, dtype: str) -> Pair:
        """Do both runs of a dtype, with their steps alternating, so that both have the same load of the machine."""
        pair = Pair(f"in {dtype}", *(self._local(dtype, plain) for plain in (False, True)))
        self._show((step for step, _ in zip(pair.ours.run(), pair.plain.run(), strict=True)), *pair[1:])
        return pair

    def race_of_ranks(self) -> list[Pair]:
        """Do the runs on two ranks, at each stage and once more with a kill; then of one process on their batches.

        That process does two backwards in a step. All runs use the same number of threads in a backward, since the sums
        depend on it.
        """
        with _fewer_threads() as threads:
            plain = self._local("fp32", plain=True, exact_norm=True)
            about = self._settings, self._loop(), self._optimizer(plain=False), threads
            pairs = [Pair(f"at stage {stage}", RanksContestant(stage, *about), plain) for stage in _STAGES]
            for stage in _KILLED:
                pairs.append(Pair(f"at stage {stage} with a kill", RanksContestant(stage, *about, killed=True), plain))
            for contestant in (*(pair.ours for pair in pairs), plain):
                self._show(contestant.run(), contestant)
        return pairs

    def _show(self, steps: Iterator[Step], *contestants: Contestant) -> None:
        """Make ``steps`` with a progress bar, and print how they ended."""
        with progress_bar(self._console, self.steps) as advance:
            for step in steps:
                speed = step.step * self._loop().tokens_per_step / step.seconds
                advance(step.step, f"loss {step.loss:.4f}  {step.state(speed)}")
        for contestant in contestants:
            self.say(f"{contestant.name}: validation loss {contestant.validation_loss:.4f}")

    def report(self, pairs: list[Pair]) -> int:
        """Print the table and the verdict, and return the exit code."""
        different = self._table(pairs)
        clipped = ", ".join(f"{pair.ours.clipped} of {self.steps} {pair.what}" for pair in pairs)
        self.say(f"steps with clipped gradients: {clipped}")
        for pair in pairs[len(_DTYPES) :]:
            steps = zip(pair.ours.steps, pair.plain.steps, strict=True)
            same = sum(one.grad_norm == other.grad_norm for one, other in steps)
            where = f"on {RANKS} ranks {pair.what} and in one process"
            self.say(f"steps whose norm is the same number {where}: {same} of {self.steps}")
            if isinstance(pair.ours, RanksContestant) and pair.ours.story:
                self.say(f"{pair.ours.name}: {pair.ours.story}")
        out = self._settings.out
        if out is not None:
            title = f"longshore demo, {self._settings.size}, {self.steps} steps"
            contestants = dict.fromkeys(contestant for pair in pairs for contestant in (pair.plain, pair.ours))
            picture = loss_curves([each.series() for each in contestants], title)
            save_file(out, lambda beside: beside.write_bytes(picture), "--out")
            self.say(f"loss curves: {out}")
        if different:
            warn(f"{len(different)} parameters differ from plain PyTorch's, the first is {different[0]}")
            return 1
        *first, last = (pair.what for pair in pairs)
        self.say(
            f"All weights are equal in every bit: {len(pairs[0].ours.weights)} parameters "
            f"{', '.join(first)} and {last}.\n"
            "Plain is torch.optim.AdamW(fused=True), for bf16 on fp32 masters. Beside ranks (f64 norm) it clips by the "
            "norm in float64 that ranks agree on, not by that of torch's clip_grad_norm_."
        )
        return 0

    def _table(self, pairs: list[Pair]) -> list[str]:
        """Print the table, and return the weights that differ."""
        table = Table()
        table.add_column("run", no_wrap=True)
        for heading in ("training\nloss", "validation\nloss", "device\nbytes/param", "host\nbytes/param", "tokens/s"):
            table.add_column(heading, justify="right")
        table.add_column("weights\nequal", no_wrap=True)
        different: list[str] = []
        for pair, following in zip(pairs, [*pairs[1:], None], strict=True):
            names = differing(pair.ours.weights, pair.plain.weights)
            different += [f"{name} of {pair.ours.name}" for name in names]
            table.add_row(*pair.ours.row(), f"no: {len(names)} of {len(pair.ours.weights)}" if names else "yes")
            if following is None or pair.plain is not following.plain:
                table.add_row(*pair.plain.row(), "", end_section=True)
        self._console.print(table)
        return different

    def _loop(self) -> LoopSettings:
        asked = {name: getattr(self._settings, name) for name in ("seq_len", "batch_size", "seed")}
        return LoopSettings(
            **asked, steps=self.steps, accumulation=RANKS, eval_every=self.steps, eval_batches=_EVAL_BATCHES
        )

    def _optimizer(self, plain: bool) -> OptimizerSettings:
        return OptimizerSettings(plain=plain, warmup=min(OptimizerSettings.warmup, self.steps // 4))

    def _local(self, dtype: str, plain: bool, exact_norm: bool = False) -> LocalContestant:
        settings, optimizer = self._settings, self._optimizer(plain)
        chosen = ModelSettings(SIZES[settings.size], dtype=dtype, device="cpu")
        network = model.build_model(chosen, settings.seq_len, settings.seed, self._corpus, None)
        for name, parameter in network.named_parameters():
            # torch's fused CPU AdamW rounds the elements after the last multiple differently (docs/optimizer.md).
            if parameter.numel() % NUMEL_MULTIPLE:
                raise CommandError(f"{name} has {parameter.numel()} elements, not a multiple of {NUMEL_MULTIPLE}")
        stepper = PlainStepper(network, optimizer, exact_norm=True) if exact_norm else make_stepper(network, optimizer)
        name = f"{dtype}, plain, f64 norm" if exact_norm else f"{dtype}, {'plain' if plain else 'longshore'}"
        return LocalContestant(name, network, Loop(network, self._sequences, stepper, self._loop(), optimizer))


@contextlib.contextmanager
def _fewer_threads() -> Iterator[int]:
    """Give torch as many threads as each of the ranks has, and yield their number."""
    former = torch.get_num_threads()
    threads = max(1, former // RANKS)
    torch.set_num_threads(threads)
    try:
        yield threads
    finally:
        torch.set_num_threads(former)


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Return the names whose tensors differ in a bit (-0.0 and 0.0 do), or have an element that is not a number."""
    pairs = ((name, a, theirs[name]) for name, a in ours.items())
    found = [name for name, a, b in pairs if not (torch.equal(a, b) and torch.equal(a.signbit(), b.signbit()))]
    return found + sorted(theirs.keys() - ours.keys())

"""The runs of ``longshore demo`` on the CPU, with longshore and without it, in pairs, and a table of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from longshore.cli import model
from longshore.cli.contestants import RANKS, Contestant, LocalContestant, RanksContestant
from longshore.cli.data import Corpus, Sequences, read_text
from longshore.cli.loop import Loop, Step
from longshore.cli.output import check_writable, save_file
from longshore.cli.pictures import Compared, comparison_picture, load_figure
from longshore.cli.settings import NUMEL_MULTIPLE, SIZES, DemoSettings, LoopSettings, ModelSettings, OptimizerSettings
from longshore.cli.steppers import PlainStepper, make_stepper
from longshore.cli.terminal import CommandError, make_console, plural, progress_bar, quantity, warn

_EVAL_BATCHES = 8
_TRIAL_STEPS = 3  # for --seconds; the median leaves out the first, which warms up
_DTYPES = ("fp32", "bf16")
_STAGES = (1, 2, 3)
_KILLED = (2,)
"""Stages with a second run, which is killed and resumed."""
# The time of all runs on ranks, in units of the plain run on half the threads: 1 for that run itself, and 0.5 for
# each run that trains on the same tokens with all threads.
_RANKS_SHARE = 1.0 + 0.5 * len((*_STAGES, *_KILLED))


class Pair(NamedTuple):
    """Two runs that should have equal weights at the end."""

    what: str
    ours: Contestant
    plain: Contestant


def run(settings: DemoSettings) -> int:
    """Return 0 if every weight of every run equals its plain counterpart, else 1."""
    began = time.monotonic()
    if settings.out is not None:
        check_writable(settings.out, "--out")
        load_figure()
    text = read_text(settings.data, None)
    model.load_transformers()
    corpus = model.make_corpus(text.documents, None)
    demo = _Demo(settings, corpus, preparation_s=time.monotonic() - began)
    if settings.seconds is not None:
        demo.choose_steps(settings.seconds)
    demo.say(
        f"{text.source}: {plural(len(text.documents), 'file')}, {quantity(corpus.tokens.numel())} tokens\n"
        f"a Llama of size {settings.size}, {plural(demo.steps, 'step')} of {RANKS} x {settings.batch_size} x "
        f"{settings.seq_len} tokens, clipped to norm {OptimizerSettings.clip}, "
        f"{plural(torch.get_num_threads(), 'thread')}; {demo.runs} runs"
    )
    pairs = [demo.race(dtype) for dtype in _DTYPES]
    if settings.two_ranks:
        pairs += demo.race_of_ranks()
    return demo.report(pairs)


class _Demo:
    """The runs and their report. All of them train on the tokens of ``corpus``."""

    def __init__(self, settings: DemoSettings, corpus: Corpus, preparation_s: float) -> None:
        # A run on ranks prepares in each of them, at the same time, after torch was imported there.
        self._start_s = 5.0 + RANKS * preparation_s
        self.steps = settings.steps
        self._settings = settings
        self._corpus = corpus
        self._sequences = Sequences(corpus, settings.seq_len, settings.seed)
        self._console = make_console()
        self._begun = 0
        """Runs that were begun."""

    @property
    def runs(self) -> int:
        """The number of runs in all."""
        return 2 * len(_DTYPES) + (len((*_STAGES, *_KILLED)) + 1 if self._settings.two_ranks else 0)

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
        began = time.monotonic()
        self._show((step for step, _ in zip(pair.ours.run(), pair.plain.run(), strict=True)), *pair[1:])
        self._say_how_equal(pair)
        if self._begun == 2:
            # Of this machine, which may be busy: one run on half of the threads takes about as long as these two.
            ranks = self.runs - 2 * len(_DTYPES)
            taken = time.monotonic() - began
            left = taken * (len(_DTYPES) - 1) + (taken * _RANKS_SHARE + self._start_s * ranks if ranks else 0.0)
            self.say(f"the other {self.runs - 2} runs take about {plural(max(1, round(left / 60)), 'minute')}")
        return pair

    def _say_how_equal(self, pair: Pair) -> None:
        names = differing(pair.ours.weights, pair.plain.weights)
        found = f"differ in {len(names)} of" if names else "are equal in every bit of all"
        self.say(f"the weights {pair.what} {found} {len(pair.ours.weights)} parameters")

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
        first, self._begun = self._begun + 1, self._begun + len(contestants)
        numbers = f"run {first}" if len(contestants) == 1 else f"runs {first} and {self._begun}, step by step in turn,"
        self.say(f"{numbers} of {self.runs}: {' and '.join(each.name for each in contestants)}")
        with progress_bar(self._console, self.steps) as advance:
            for step in steps:
                speed = step.step * self._loop().tokens_per_step / step.seconds
                advance(step.step, f"loss {step.loss:.4f}  {step.state(speed)}")
        for contestant in contestants:
            speed = quantity(contestant.loop.tokens_per_step / contestant.seconds_per_step)
            self.say(f"  {contestant.name}: validation loss {contestant.validation_loss:.6f}, {speed} tokens/s")

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
            compared = [
                Compared(pair.ours.name, _losses(pair.ours), pair.plain.name, _losses(pair.plain)) for pair in pairs
            ]
            picture = comparison_picture(compared, f"longshore demo, {self._settings.size}, {self.steps} steps")
            save_file(out, lambda beside: beside.write_bytes(picture), "--out")
            self.say(f"loss curves and their differences: {out}")
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
        table = Table(padding=0)  # so that it fits 80 columns
        table.add_column("run", no_wrap=True)
        headings = ("training\nloss", "validation\nloss", "device\nbytes/\nparam", "host\nbytes/\nparam", "tokens/s")
        for heading in headings:
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


def _losses(contestant: Contestant) -> dict[int, float]:
    return {step.step: step.loss for step in contestant.steps}


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

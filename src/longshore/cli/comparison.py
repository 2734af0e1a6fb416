"""The runs of ``longshore demo`` on the CPU, with longshore and without it, in pairs, and a table of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from longshore.cli import curve, model
from longshore.cli.contestants import (
    RANKS,
    Contestant,
    KilledContestant,
    LocalContestant,
    RanksContestant,
)
from longshore.cli.data import Corpus, Sequences, read_text
from longshore.cli.failure import CommandError
from longshore.cli.loop import Loop, Step
from longshore.cli.output import check_writable, write_file
from longshore.cli.settings import (
    NUMEL_MULTIPLE,
    SIZES,
    DemoSettings,
    LoopSettings,
    ModelSettings,
    OptimizerSettings,
)
from longshore.cli.steppers import ExactNormStepper, make_stepper
from longshore.cli.terminal import Display, make_console, plural, quantity, warn

_EVAL_BATCHES = 8
_TRIAL_STEPS = 3  # for --seconds; the median leaves out the first, which warms up
_DTYPES = ("fp32", "bf16")
_STAGES = (1, 2, 3)
_KILLED = (2,)
"""Stages with a second run, which is killed and resumed."""
# The time of all runs on ranks, in units of the plain run on half the threads: that run itself, and half of its time
# for each run that has the same tokens on all threads.
_RANKS_SHARE = 1.0 + 0.5 * len((*_STAGES, *_KILLED))


class Pair(NamedTuple):
    """Two runs that should have equal weights at the end."""

    what: str
    ours: Contestant
    plain: Contestant


def run(settings: DemoSettings) -> int:
    """Return 0 if every weight of every run equals its plain counterpart, else 1."""
    if settings.out is not None:
        check_writable(settings.out, "--out")
        curve.load_figure()
    text = read_text(settings.data, None)
    model.load_transformers()
    demo = _Demo(settings, model.make_corpus(text.documents, None), make_console())
    if settings.seconds is not None:
        demo.choose_steps(settings.seconds)
    demo.say(
        f"{text.source}: {plural(len(text.documents), 'file')}, {quantity(demo.corpus.tokens.numel())} tokens\n"
        f"a Llama of size {settings.size}, {plural(demo.steps, 'step')} of {RANKS} x {settings.batch_size} x "
        f"{settings.seq_len} tokens, clipped to norm {OptimizerSettings.clip}, "
        f"{plural(torch.get_num_threads(), 'thread')}"
    )
    pairs = [demo.race(dtype) for dtype in _DTYPES]
    if settings.two_ranks:
        pairs += demo.race_of_ranks()
    return demo.report(pairs)


class _Demo:
    """The runs and their report.

    Args:
        settings: of the command line.
        corpus: the tokens on which all runs train.
        console: for the report.
    """

    def __init__(self, settings: DemoSettings, corpus: Corpus, console: Console) -> None:
        self.steps = settings.steps
        self.corpus = corpus
        self._settings = settings
        self._sequences = Sequences(corpus, settings.seq_len, settings.seed)
        self._console = console

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def choose_steps(self, seconds: float) -> None:
        """Choose the steps with which all runs take ``seconds``, from a few steps of each."""
        self.steps, taken = _TRIAL_STEPS, 0.0
        for dtype in _DTYPES:
            taken += sum(_trial(self._local(dtype, plain)) for plain in (False, True))
        if self._settings.two_ranks:
            with _fewer_threads():
                taken += _RANKS_SHARE * _trial(self._local("fp32", plain=True, exact_norm=True))
        self.steps = max(1, int(seconds / taken))

    def race(self, dtype: str) -> Pair:
        """Do both runs of a dtype, a step of one and a step of the other in turn, so that both have the same load."""
        pair = Pair(f"in {dtype}", *(self._local(dtype, plain) for plain in (False, True)))
        with Display(self._console, self.steps) as display:
            for step, _ in zip(pair.ours.run(), pair.plain.run(), strict=True):
                self._show(step, display)
        for contestant in pair[1:]:
            self.say(f"{contestant.name}: validation loss {contestant.validation_loss:.4f}")
        return pair

    def race_of_ranks(self) -> list[Pair]:
        """Do the runs on two ranks, at each stage and once more with a kill, then one process with their batches.

        It has two backwards in a step. All have the same number of threads in a backward, on which its sums depend.
        """
        with _fewer_threads() as threads:
            plain = self._local("fp32", plain=True, exact_norm=True)
            about = self._settings, self._loop(), self._optimizer(plain=False), threads
            pairs = [Pair(f"at stage {stage}", RanksContestant(stage, *about), plain) for stage in _STAGES]
            pairs += [
                Pair(f"at stage {stage} with a kill", KilledContestant(stage, *about), plain) for stage in _KILLED
            ]
            for contestant in (*(pair.ours for pair in pairs), plain):
                with Display(self._console, self.steps) as display:
                    for step in contestant.run():
                        self._show(step, display)
                self.say(f"{contestant.name}: validation loss {contestant.validation_loss:.4f}")
        return pairs

    def report(self, pairs: list[Pair]) -> int:
        """Print the table and the verdict, and return the exit code."""
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
        clipped = ", ".join(f"{pair.ours.clipped} of {self.steps} {pair.what}" for pair in pairs)
        self.say(f"steps with clipped gradients: {clipped}")
        for pair in pairs[len(_DTYPES) :]:
            steps = zip(pair.ours.steps, pair.plain.steps, strict=True)
            same = sum(one.grad_norm == other.grad_norm for one, other in steps)
            self.say(
                f"steps whose norm is the same number on {RANKS} ranks {pair.what} and in one process: "
                f"{same} of {self.steps}"
            )
            if isinstance(pair.ours, KilledContestant):
                self.say(f"{pair.ours.name}: {pair.ours.story}")
        self._write_curves(pairs)
        if different:
            warn(f"{len(different)} parameters differ from plain PyTorch's, the first is {different[0]}")
            return 1
        *first, last = (pair.what for pair in pairs)
        self.say(
            f"All weights are equal: torch.equal over {len(pairs[0].ours.weights)} parameters "
            f"{', '.join(first)} and {last}.\n"
            f"Plain is torch.optim.AdamW(fused=True), for bf16 on fp32 masters."
        )
        return 0

    def _write_curves(self, pairs: list[Pair]) -> None:
        out = self._settings.out
        if out is None:
            return
        title = f"longshore demo, {self._settings.size}, {self.steps} steps"
        contestants = dict.fromkeys(contestant for pair in pairs for contestant in (pair.plain, pair.ours))
        write_file(out, curve.loss_curves([each.series() for each in contestants], title), "--out")
        self.say(f"loss curves: {out}")

    def _show(self, step: Step, display: Display) -> None:
        display.advance(step.step, step.state(step.step * self._loop().tokens_per_step / step.seconds))

    def _loop(self) -> LoopSettings:
        asked = {name: getattr(self._settings, name) for name in ("seq_len", "batch_size", "seed")}
        return LoopSettings(
            **asked, steps=self.steps, accumulation=RANKS, eval_every=self.steps, eval_batches=_EVAL_BATCHES
        )

    def _optimizer(self, plain: bool) -> OptimizerSettings:
        return OptimizerSettings(plain=plain, warmup=min(OptimizerSettings.warmup, self.steps // 4))

    def _local(self, dtype: str, plain: bool, exact_norm: bool = False) -> LocalContestant:
        """Return a run in this process."""
        settings, optimizer = self._settings, self._optimizer(plain)
        chosen = ModelSettings(SIZES[settings.size], dtype=dtype, device="cpu")
        network = model.build_model(chosen, settings.seq_len, settings.seed, self.corpus, None)
        for name, parameter in network.named_parameters():
            # torch's fused CPU AdamW rounds the elements after the last multiple differently (docs/optimizer.md).
            if parameter.numel() % NUMEL_MULTIPLE:
                raise CommandError(f"{name} has {parameter.numel()} elements, not a multiple of {NUMEL_MULTIPLE}")
        stepper = ExactNormStepper(network, optimizer) if exact_norm else make_stepper(network, optimizer)
        name = f"{dtype}, plain, f64 norm" if exact_norm else f"{dtype}, {'plain' if plain else 'longshore'}"
        return LocalContestant(name, network, Loop(network, self._sequences, stepper, self._loop(), optimizer))


@contextmanager
def _fewer_threads() -> Iterator[int]:
    """Give torch as many threads as each of the ranks has, and yield their number."""
    former = torch.get_num_threads()
    threads = max(1, former // RANKS)
    torch.set_num_threads(threads)
    try:
        yield threads
    finally:
        torch.set_num_threads(former)


def _trial(contestant: Contestant) -> float:
    for _ in contestant.run():
        pass
    return contestant.seconds_per_step


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Return the names whose tensors are not ``torch.equal``."""
    return [name for name in ours if not torch.equal(ours[name], theirs[name])] + sorted(theirs.keys() - ours.keys())

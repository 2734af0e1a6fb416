"""The runs of ``longshore demo`` on the CPU, with longshore and without it, in pairs, and a table of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from longshore.cli import curve, model
from longshore.cli.contestants import (
    RANKS,
    Contestant,
    KilledContestant,
    LocalContestant,
    RanksContestant,
    set_threads,
)
from longshore.cli.data import Corpus, Sequences, read_text
from longshore.cli.failure import CommandError
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

_ACCUMULATION = RANKS
_EVAL_BATCHES = 8
_TRIAL_STEPS = 3  # for --seconds; the median leaves out the first, which warms up
_DTYPES = ("fp32", "bf16")
_STAGES = (1, 2, 3)
_KILLED = (2,)
"""Stages with a second run, which is killed and resumed."""
# The time of all runs on ranks, in that of the plain run beside them, which has half the threads: that run itself, and
# at each stage as many tokens on all threads.
_RANKS_SHARE = 1.0 + 0.5 * len((*_STAGES, *_KILLED))


class DemoData(NamedTuple):
    """The data on which all runs train."""

    corpus: Corpus
    sequences: Sequences


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
    corpus = model.make_corpus(text.documents, None)
    data = DemoData(corpus, Sequences(corpus, settings.seq_len, settings.seed))
    console = make_console()
    steps = settings.steps if settings.seconds is None else _affordable_steps(settings, data)
    console.print(
        f"{text.source}: {plural(len(text.documents), 'file')}, {quantity(corpus.tokens.numel())} tokens\n"
        f"a Llama of size {settings.size}, {plural(steps, 'step')} of {_ACCUMULATION} x {settings.batch_size} x "
        f"{settings.seq_len} tokens, clipped to norm {OptimizerSettings.clip}, "
        f"{plural(torch.get_num_threads(), 'thread')}",
        markup=False,
    )
    pairs = [_race(settings, steps, dtype, data, console) for dtype in _DTYPES]
    if settings.two_ranks:
        pairs += _race_of_ranks(settings, steps, data, console)
    return _report(pairs, settings, steps, console)


def _race(settings: DemoSettings, steps: int, dtype: str, data: DemoData, console: Console) -> Pair:
    """Do both runs of a dtype, in turn a step of one and a step of the other, so that the load is the same for both."""
    pair = Pair(f"in {dtype}", *(_local(settings, steps, dtype, plain, data) for plain in (False, True)))
    tokens = _loop(settings, steps).tokens_per_step
    with Display(console, steps) as display:
        for step, _ in zip(pair.ours.run(), pair.plain.run(), strict=True):
            if step is not None:
                display.advance(step.step, step.state(step.step * tokens / step.seconds))
        for contestant in pair[1:]:
            display.line(_ended(contestant))
    return pair


def _race_of_ranks(settings: DemoSettings, steps: int, data: DemoData, console: Console) -> list[Pair]:
    """Do the runs on two ranks, at each stage and once more with a kill, then one process with their batches.

    It has two backwards in a step. All have the same number of threads in a backward, on which its sums depend.
    """
    threads = max(1, torch.get_num_threads() // RANKS)
    loop, plain = _loop(settings, steps), _exact(settings, steps, data)
    about = loop, _optimizer(steps, plain=False), settings.size, settings.data, threads
    pairs = [Pair(f"at stage {stage}", RanksContestant(stage, *about), plain) for stage in _STAGES]
    pairs += [Pair(f"at stage {stage} with a kill", KilledContestant(stage, *about), plain) for stage in _KILLED]
    former = set_threads(threads)
    try:
        for contestant in (*(pair.ours for pair in pairs), plain):
            with Display(console, steps) as display:
                for step in contestant.run():
                    if step is not None:
                        speed = step.step * loop.tokens_per_step / step.seconds
                        display.advance(step.step, step.state(speed))
                display.line(_ended(contestant))
    finally:
        set_threads(former)
    return pairs


def _ended(contestant: Contestant) -> str:
    return f"{contestant.name}: validation loss {contestant.validation_loss:.4f}"


def _loop(settings: DemoSettings, steps: int) -> LoopSettings:
    return LoopSettings(
        seq_len=settings.seq_len,
        steps=steps,
        batch_size=settings.batch_size,
        accumulation=_ACCUMULATION,
        seed=settings.seed,
        eval_every=steps,
        eval_batches=_EVAL_BATCHES,
    )


def _optimizer(steps: int, plain: bool) -> OptimizerSettings:
    return OptimizerSettings(plain=plain, warmup=min(OptimizerSettings.warmup, steps // 4))


def _local(settings: DemoSettings, steps: int, dtype: str, plain: bool, data: DemoData) -> LocalContestant:
    optimizer, network = _optimizer(steps, plain), _network(settings, dtype, data.corpus)
    name = f"{dtype}, {'plain' if plain else 'longshore'}"
    stepper = make_stepper(network, optimizer)
    return LocalContestant(name, network, stepper, _loop(settings, steps), optimizer, data.sequences)


def _exact(settings: DemoSettings, steps: int, data: DemoData) -> LocalContestant:
    optimizer, network = _optimizer(steps, plain=True), _network(settings, "fp32", data.corpus)
    name, stepper = "fp32, plain, f64 norm", ExactNormStepper(network, optimizer)
    return LocalContestant(name, network, stepper, _loop(settings, steps), optimizer, data.sequences)


def _network(settings: DemoSettings, dtype: str, corpus: Corpus) -> nn.Module:
    chosen = ModelSettings(SIZES[settings.size], dtype=dtype, device="cpu")
    network = model.build_model(chosen, settings.seq_len, settings.seed, corpus, None)
    for name, parameter in network.named_parameters():
        # torch's fused CPU AdamW rounds the elements after the last multiple differently (docs/optimizer.md).
        if parameter.numel() % NUMEL_MULTIPLE:
            raise CommandError(f"{name} has {parameter.numel()} elements, not a multiple of {NUMEL_MULTIPLE}")
    return network


def _affordable_steps(settings: DemoSettings, data: DemoData) -> int:
    """Return the steps with which all runs take ``settings.seconds``, from a few steps of each."""
    assert settings.seconds is not None
    seconds = 0.0
    for dtype in _DTYPES:
        for plain in (False, True):
            seconds += _trial(_local(settings, _TRIAL_STEPS, dtype, plain, data))
    if settings.two_ranks:
        former = set_threads(max(1, torch.get_num_threads() // RANKS))
        seconds += _RANKS_SHARE * _trial(_exact(settings, _TRIAL_STEPS, data))
        set_threads(former)
    return max(1, int(settings.seconds / seconds))


def _trial(contestant: Contestant) -> float:
    for _ in contestant.run():
        pass
    return contestant.seconds_per_step


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Return the names whose tensors are not ``torch.equal``."""
    return [name for name in ours if not torch.equal(ours[name], theirs[name])] + sorted(theirs.keys() - ours.keys())


def _report(pairs: list[Pair], settings: DemoSettings, steps: int, console: Console) -> int:
    table = Table()
    table.add_column("run", no_wrap=True)
    for heading in ("training\nloss", "validation\nloss", "device\nbytes/param", "host\nbytes/param", "tokens/s"):
        table.add_column(heading, justify="right")
    table.add_column("weights\nequal", no_wrap=True)
    different: list[str] = []
    for pair in pairs:
        names = differing(pair.ours.weights, pair.plain.weights)
        different += [f"{name} of {pair.ours.name}" for name in names]
        verdict = f"no: {len(names)} of {len(pair.ours.weights)}" if names else "yes"
        table.add_row(*_row(pair.ours, settings), verdict)
        if pair is pairs[-1] or pair.plain is not pairs[pairs.index(pair) + 1].plain:
            table.add_row(*_row(pair.plain, settings), "", end_section=True)
    console.print(table)
    clipped = ", ".join(f"{pair.ours.clipped} of {steps} {pair.what}" for pair in pairs)
    console.print(f"steps with clipped gradients: {clipped}", markup=False)
    for pair in pairs[len(_DTYPES) :]:
        console.print(
            f"steps whose norm is the same number on {RANKS} ranks {pair.what} and in one process: "
            f"{_same_norms(pair)} of {steps}",
            markup=False,
        )
        if isinstance(pair.ours, KilledContestant):
            console.print(f"{pair.ours.name}: {pair.ours.story}", markup=False)
    if settings.out is not None:
        title = f"longshore demo, {settings.size}, {steps} steps"
        contestants = dict.fromkeys(contestant for pair in pairs for contestant in (pair.plain, pair.ours))
        series = [contestant.series() for contestant in contestants]
        write_file(settings.out, curve.loss_curves(series, title), "--out")
        console.print(f"loss curves: {settings.out}", markup=False)
    if different:
        warn(f"{len(different)} parameters differ from plain PyTorch's, the first is {different[0]}")
        return 1
    console.print(
        f"All weights are equal: torch.equal over {len(pairs[0].ours.weights)} parameters "
        f"{_listed([pair.what for pair in pairs])}.\n"
        f"Plain is torch.optim.AdamW(fused=True), for bf16 on fp32 masters.",
        markup=False,
    )
    return 0


def _same_norms(pair: Pair) -> int:
    return sum(one.grad_norm == other.grad_norm for one, other in zip(pair.ours.steps, pair.plain.steps, strict=True))


def _listed(parts: list[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def _row(contestant: Contestant, settings: DemoSettings) -> list[str]:
    last = contestant.steps[-1]
    numel = contestant.numel
    return [
        contestant.name,
        f"{last.loss:.6f}",
        f"{contestant.validation_loss:.6f}",
        f"{last.memory.device / numel:.2f}",
        f"{last.memory.host / numel:.2f}",
        quantity(_loop(settings, 1).tokens_per_step / contestant.seconds_per_step),
    ]

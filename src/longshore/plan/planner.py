"""From a model, a machine and a job to every way to train, what each takes, and the one to take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from longshore.engine.wording import byte_count
from longshore.errors import LongshoreError
from longshore.kernels import SUPPORTED_DTYPES
from longshore.plan.choice import Choice, Job
from longshore.plan.layout import RankLayout, lay_out
from longshore.plan.machine import PlanMachine
from longshore.plan.memory import PlannedBytes, count_bytes
from longshore.plan.model import PlannedModel
from longshore.plan.simulation import Simulation, simulate

DEVICE_SHARE = 0.94
"""Of a device's memory that is planned with: the driver, libraries and gaps take the rest."""
HOST_SHARE = 0.95
"""The same of a host's."""
HIDDEN_SHARE = 0.05
"""Offload counts as hidden where a step is longer by no more than this share of it."""
_ALIKE = 0.01
"""Choices whose steps differ by less are as good; the simpler one is recommended."""
_MOST_TOKENS = 1 << 28
_RATIO_STEP = 0.05
_SPARE_STEP = 0.1


class DoesNotFit(LongshoreError):
    """No choice fits the machine; says by how much."""


@dataclass(frozen=True)
class Shortage:
    """Bytes by which something is too large; 0: it fits."""

    device: int
    host: int

    @property
    def text(self) -> str:
        """What is missing where."""
        missing = [
            f"{byte_count(count)} more {where}"
            for count, where in ((self.device, "on each device"), (self.host, "on each host"))
            if count > 0
        ]
        return "needs " + " and ".join(missing) if missing else "fits"

    @property
    def fits(self) -> bool:
        return self.device <= 0 and self.host <= 0


@dataclass(frozen=True)
class Candidate:
    """One choice: its bytes, and, where it fits, its times."""

    choice: Choice
    bytes: PlannedBytes
    shortage: Shortage
    times: Simulation | None


@dataclass(frozen=True)
class Plan:
    """All that a plan has to say.

    Attributes:
        offloaded: of the choices that copy between device and host, the recommended one; None: none that fits does.
        hidden_at: tokens a step, over all ranks, from which on its offload is hidden; None: at no number.
    """

    model: PlannedModel
    machine: PlanMachine
    job: Job
    candidates: tuple[Candidate, ...]
    recommended: Candidate
    offloaded: Candidate | None
    hidden_at: int | None

    @property
    def distinct(self) -> tuple[Candidate, ...]:
        """The candidates; on one rank those of one stage, since all are alike."""
        first = self.candidates[0].choice.stage
        return tuple(each for each in self.candidates if self.machine.ranks > 1 or each.choice.stage == first)


def plan(
    model: PlannedModel, machine: PlanMachine, job: Job, allows: Callable[[Choice], bool] = lambda choice: True
) -> Plan:
    """Count, simulate and choose among the choices that ``allows`` returns true for.

    Raises:
        DoesNotFit: no choice fits; names the one that comes nearest, and by how much it misses.
        ValueError: a model without parameters to train, or with some of a dtype that is not trained; no choice is left.
    """
    model = _checked(model.cast(job.dtype))
    scalar = next((each.name for each in model.parameters if not each.shape), None)
    if scalar is not None and machine.ranks > 1:
        why = f"{scalar} is a single number, which FSDP2 cannot shard; give it the shape [1]"
        model = replace(model, notes=(*model.notes, f"stage 3 is left out: {why}"))
    candidates: list[Candidate] = []
    first: dict[str, list[Candidate]] = {}
    for choice in choices(machine):
        if choice.stage == 3 and scalar is not None and machine.ranks > 1:
            continue
        if machine.ranks == 1 and choice.offload in first:
            # One rank shares nothing: every stage is the same.
            candidates += [
                replace(each, choice=replace(each.choice, stage=choice.stage)) for each in first[choice.offload]
            ]
            continue
        first[choice.offload] = found = list(_with_variants(model, machine, job, choice))
        candidates += found
    candidates = [each for each in candidates if allows(each.choice)]
    if not candidates:
        raise ValueError(f"no choice is left: {'; '.join(model.notes)}")
    fitting = [each for each in candidates if each.times is not None]
    if not fitting:
        raise DoesNotFit(_refusal(model, machine, job, candidates))
    recommended = _best(fitting)
    offloading = [each for each in fitting if _moves(machine, each.choice)]
    offloaded = _best(offloading) if offloading else None
    hidden = None if offloaded is None else hidden_at(model, machine, job, offloaded.choice)
    return Plan(model, machine, job, tuple(candidates), recommended, offloaded, hidden)


def _checked(model: PlannedModel) -> PlannedModel:
    """What there is to train of a model that is cast already; a parameter without elements is nothing."""
    model = replace(model, parameters=tuple(each for each in model.parameters if each.numel))
    if not model.trainable:
        raise ValueError(f"{model.name} has no parameters that are trained; give a model that has some")
    for each in model.trainable:
        if each.dtype not in SUPPORTED_DTYPES:
            names = ", ".join(str(dtype) for dtype in SUPPORTED_DTYPES)
            raise ValueError(f"{each.name} is {each.dtype}; longshore trains {names}: give --dtype bf16, fp16 or fp32")
    return model


def choices(machine: PlanMachine) -> Iterator[Choice]:
    """Stages and places of the optimizer's state, in the order of preference among equals."""
    for stage in range(4):
        if machine.staged:
            yield Choice(stage, "none")
        yield Choice(stage, "cpu")


def evaluate(model: PlannedModel, machine: PlanMachine, job: Job, choice: Choice) -> Candidate:
    """One choice."""
    candidate, layout = _counted(model, machine, job, choice)
    return _timed(model, machine, job, candidate, layout)


def _counted(model: PlannedModel, machine: PlanMachine, job: Job, choice: Choice) -> tuple[Candidate, RankLayout]:
    layout = lay_out(model, job, choice, machine.ranks, machine.staged)
    counted = count_bytes(model, job, choice, layout, machine.ranks, machine.staged)
    return Candidate(choice, counted, shortage_of(machine, counted), None), layout


def _timed(model: PlannedModel, machine: PlanMachine, job: Job, candidate: Candidate, layout: RankLayout) -> Candidate:
    if not candidate.shortage.fits:
        return candidate
    return replace(candidate, times=simulate(model, machine, job, candidate.choice, layout))


def shortage_of(machine: PlanMachine, counted: PlannedBytes) -> Shortage:
    """By how much a choice is too large for a device and for a host with its ranks."""
    device, host = counted.device_total, counted.host_total
    if not machine.staged:
        device, host = 0, host + device
    return Shortage(
        device - int(DEVICE_SHARE * machine.device_bytes),
        host * machine.ranks_per_host - int(HOST_SHARE * machine.host_bytes),
    )


def _with_variants(model: PlannedModel, machine: PlanMachine, job: Job, choice: Choice) -> Iterator[Candidate]:
    """The choice; with spares; with a part of the state on the device; and with both."""
    plain, layout = _counted(model, machine, job, choice)
    yield _timed(model, machine, job, plain, layout)
    if not _moves(machine, choice) or plain.shortage.device > 0:
        return  # the others take more of a device
    variants = [choice] if plain.shortage.fits else []
    ratio = _least_ratio(model, machine, job, choice)
    if ratio < 1.0:  # which also takes less of a host
        variants.append(part := replace(choice, ratio=ratio))
        yield evaluate(model, machine, job, part)
    for each in variants:
        spares = _most_spares(model, machine, job, each)
        if spares:
            yield evaluate(model, machine, job, replace(each, speculation=spares))


def _moves(machine: PlanMachine, choice: Choice) -> bool:
    """Whether anything is copied between device and host."""
    return machine.staged and choice.offload == "cpu"


def _most_spares(model: PlannedModel, machine: PlanMachine, job: Job, choice: Choice) -> float:
    for tenths in range(round(1 / _SPARE_STEP), 0, -1):
        share = tenths * _SPARE_STEP if tenths < round(1 / _SPARE_STEP) else 1.0
        if _counted(model, machine, job, replace(choice, speculation=round(share, 2)))[0].shortage.fits:
            return round(share, 2)
    return 0.0


def _least_ratio(model: PlannedModel, machine: PlanMachine, job: Job, choice: Choice) -> float:
    """The smallest share on the host for which the device has room for the rest; 1.0: it has none."""
    steps = round(1 / _RATIO_STEP)
    for step in range(steps):
        ratio = round(step * _RATIO_STEP, 2)
        if _counted(model, machine, job, replace(choice, ratio=ratio))[0].shortage.device <= 0:
            return ratio if ratio > 0.0 else 1.0  # all of it on the device is no offload
    return 1.0


def _best(candidates: Sequence[Candidate]) -> Candidate:
    """The first, and so the simplest, of those that are as good as the fastest."""

    def seconds(candidate: Candidate) -> float:
        assert candidate.times is not None
        return candidate.times.step_s

    least = min(map(seconds, candidates))
    good = [each for each in candidates if seconds(each) <= (1 + _ALIKE) * least]

    def features(candidate: Candidate) -> tuple[bool, bool, bool]:
        choice = candidate.choice
        return choice.offload != "none", choice.speculation > 0, choice.ratio < 1

    return min(good, key=features)


def hidden_at(model: PlannedModel, machine: PlanMachine, job: Job, choice: Choice) -> int | None:
    """The fewest tokens a step, over all ranks, at which what the step takes after backward is a small share of it.

    Backward is made longer by larger batches, whether or not their activations fit: accumulation does the same.
    """
    layout = lay_out(model, job, choice, machine.ranks, machine.staged)

    def hidden(sequences: int) -> bool:
        times = simulate(model, machine, replace(job, batch_size=sequences, accumulation=1), choice, layout)
        return times.exposed_s <= HIDDEN_SHARE * times.step_s

    most = max(1, _MOST_TOKENS // job.seq_len)
    high = 1
    while not hidden(high):
        if high >= most:
            return None
        high *= 2
    low = high // 2
    while high - low > max(1, high // 64):
        middle = (low + high) // 2
        low, high = (low, middle) if hidden(middle) else (middle, high)
    return high * job.seq_len * machine.ranks


def _refusal(model: PlannedModel, machine: PlanMachine, job: Job, candidates: Sequence[Candidate]) -> str:
    # The least that would have to be bought.
    nearest = min(
        candidates, key=lambda each: max(0, each.shortage.device) * machine.ranks_per_host + max(0, each.shortage.host)
    )
    activations = nearest.bytes.device_estimates.get("activations", 0)
    advice = "more devices (--gpus, --hosts), a smaller model"
    # Without devices of their own they are on the host, with those of its other ranks.
    missing = nearest.shortage.device if machine.staged else nearest.shortage.host / machine.ranks_per_host
    if 0 < missing < activations:
        smaller = "a smaller --batch-size or --seq-len" + ("" if job.checkpointing else ", --activation-checkpointing")
        advice = f"{smaller}, or {advice}"
    where = f"{byte_count(machine.device_bytes)} on each device and " if machine.staged else ""
    return (
        f"{model.name} ({model.numel:,} parameters) does not fit on {machine.name} with {where}"
        f"{byte_count(machine.host_bytes)} on each host; what comes nearest, {nearest.choice.title}, "
        f"{nearest.shortage.text}: try {advice}"
    )

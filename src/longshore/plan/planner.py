"""Count and simulate every choice for a model, a machine and a job, and recommend one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from longshore import LongshoreError
from longshore.plan.job import Job, PlanChoice, PlannedModel
from longshore.plan.layout import RankLayout, lay_out
from longshore.plan.machine import PlanMachine
from longshore.plan.matrices import divided, notes_of
from longshore.plan.memory import PlannedBytes, count_bytes
from longshore.plan.simulation import Simulation, simulate
from longshore.seam import SUPPORTED_DTYPES, format_byte_size

DEVICE_SHARE = 0.94
"""Share of a device's memory that a plan may use; the driver, libraries and fragmentation take the rest."""
HOST_SHARE = 0.95
"""Share of a host's memory that a plan may use."""
HIDDEN_SHARE = 0.05
"""Offload counts as hidden if at most this share of a step is exposed."""
_ALIKE = 0.01
"""Of choices whose steps differ by less than this share, the simplest is recommended."""
_MOST_TOKENS = 1 << 28
_RATIO_STEPS, _SPARE_STEP_PERCENT = 20, 10


class DoesNotFit(LongshoreError):
    """No choice fits the machine."""


@dataclass(frozen=True)
class Candidate:
    """A choice with its bytes and, if it fits, with its simulated times."""

    choice: PlanChoice
    layout: RankLayout
    bytes: PlannedBytes
    missing_device: int  # bytes by which it is too large for a device; negative: bytes that are left
    missing_host: int  # the same for a host
    times: Simulation | None = None

    @property
    def fits(self) -> bool:
        return self.missing_device <= 0 and self.missing_host <= 0

    @property
    def shortage(self) -> str:
        """The memory that is missing, in words."""
        missing = {"device": self.missing_device, "host": self.missing_host}
        words = [f"{format_byte_size(count)} more on each {place}" for place, count in missing.items() if count > 0]
        return f"needs {' and '.join(words)}"


@dataclass(frozen=True)
class Plan:
    """The result of :func:`plan`."""

    model: PlannedModel
    machine: PlanMachine
    job: Job
    candidates: tuple[Candidate, ...]
    recommended: Candidate
    offloaded: Candidate | None  # the best one that copies between device and host; None: none of them fits
    hidden_at: int | None  # tokens in a step, over all ranks, from which its offload is hidden; None: it never is

    @property
    def distinct(self) -> tuple[Candidate, ...]:
        """The candidates; on one rank those of the first stage alone, since all stages are alike."""
        first = self.candidates[0].choice.stage
        several = self.machine.ranks > 1
        return tuple(each for each in self.candidates if several or each.choice.stage == first or each.choice.streams)

    @cached_property
    def by_format(self) -> Mapping[str, tuple[Candidate, ...]]:
        """The distinct choices without a ratio or spares, counted with each format that the states may have."""
        plain = [each for each in self.distinct if each.choice.ratio == 1.0 and not each.choice.speculation]
        found: dict[str, tuple[Candidate, ...]] = {}
        for format in self.job.state_formats:
            planner = Planner(self.model, self.machine, replace(self.job, states=format.value))
            own = format is self.job.state_format
            found[format.value] = tuple(each if own else planner.count(each.choice) for each in plain)
        return found


def plan(
    model: PlannedModel, machine: PlanMachine, job: Job, allows: Callable[[PlanChoice], bool] = lambda choice: True
) -> Plan:
    """Evaluate all choices for which ``allows`` returns true, and recommend one.

    Raises:
        DoesNotFit: no choice fits; the message names the nearest choice, and the memory that it lacks.
        ValueError: the model has no parameters to train, some of a dtype that longshore does not train, or one that
            Muon cannot divide; or no choice is allowed.
    """
    model = divided(_checked(model.cast(job.dtype)), job)
    stages = range(4 if machine.ranks > 1 else 1)
    scalar = next((each.name for each in model.parameters if not each.shape), None)
    if scalar is not None and machine.ranks > 1:
        stages = range(3)
        why = f"FSDP2 cannot shard {scalar}, which is a scalar; give it the shape [1]"
        model = replace(model, notes=(*model.notes, f"stage 3 is left out: {why}"))
    planner = Planner(model, machine, job)
    # Among equal choices the first is preferred.
    candidates = [
        each
        for stage in stages
        for offload in (("none", "cpu") if machine.staged else ("cpu",))
        for each in planner.variants(PlanChoice(stage, offload))
    ]
    if machine.ranks == 1:
        # One rank shards nothing, so all stages are alike.
        candidates = [
            replace(each, choice=replace(each.choice, stage=stage)) for stage in range(4) for each in candidates
        ]
    if machine.staged and scalar is None and model.units and not model.not_streamed:
        candidates += planner.variants(PlanChoice(3, "cpu", param_device="cpu"))
    candidates = [each for each in candidates if allows(each.choice)]
    if not candidates:
        blocks = [] if model.units else ["a model without blocks is not streamed"]
        blocks += [model.not_streamed] if model.not_streamed else []
        excluded = "the stage, offload and streaming that are asked for exclude each other"
        why = [*model.notes, *blocks] or [f"{excluded} (--stream needs stage 3 and the optimizer's state on the host)"]
        raise ValueError(f"no choice is left: {'; '.join(why)}")
    fitting = [each for each in candidates if each.fits]
    if not fitting:
        raise DoesNotFit(planner.refusal(candidates))
    offloading = [each for each in fitting if planner.moves(each.choice)]
    offloaded = _best(offloading) if offloading else None
    hidden = None if offloaded is None else planner.hidden_at(offloaded.choice)
    notes = notes_of(model, job, machine, any(each.choice.streams for each in candidates))
    model = replace(model, notes=(*model.notes, *notes))
    return Plan(model, machine, job, tuple(candidates), _best(fitting), offloaded, hidden)


def _checked(model: PlannedModel) -> PlannedModel:
    """Return a model, which is cast already, without the parameters that have no elements."""
    model = replace(model, parameters=tuple(each for each in model.parameters if each.numel))
    if not model.trainable:
        raise ValueError(f"{model.name} has no parameters that are trained; give a model that has some")
    for each in model.trainable:
        if each.dtype not in SUPPORTED_DTYPES:
            names = ", ".join(map(str, SUPPORTED_DTYPES))
            raise ValueError(f"{each.name} is {each.dtype}; longshore trains {names}: give --dtype bf16, fp16 or fp32")
    return model


def _best(candidates: Sequence[Candidate]) -> Candidate:
    """Return the simplest, and then the first, of the candidates that are as good as the fastest; one whose parameters
    rest on the host only if there are no others."""
    candidates = [each for each in candidates if not each.choice.streams] or candidates
    steps = {each.choice: each.times.step_s for each in candidates if each.times is not None}
    good = [choice for choice, step_s in steps.items() if step_s <= (1 + _ALIKE) * min(steps.values())]
    best = min(good, key=lambda choice: (choice.offloads, bool(choice.speculation), choice.ratio < 1))
    return next(each for each in candidates if each.choice == best)


@dataclass(frozen=True)
class Planner:
    """Evaluates choices for one model, machine and job."""

    model: PlannedModel
    machine: PlanMachine
    job: Job

    def moves(self, choice: PlanChoice) -> bool:
        """Return whether anything is copied between device and host."""
        return self.machine.staged and choice.offloads

    def count(self, choice: PlanChoice) -> Candidate:
        """Return the choice with its bytes. By themselves, gradients are added on the device where it has room for all
        sums."""
        machine = self.machine
        layout = lay_out(self.model, self.job, choice, machine.ranks, machine.staged, threads=machine.threads_of_a_rank)
        found = self._count(choice, layout)
        if self.job.accumulate == "host" or not layout.may_add_on_device:
            return found
        added = self._count(choice, replace(layout, sums_on_device=True))
        return added if added.fits or self.job.accumulate == "device" else found

    def _count(self, choice: PlanChoice, layout: RankLayout) -> Candidate:
        machine, counted = self.machine, count_bytes(layout)
        device, host = counted.device_total, counted.host_total
        if not machine.staged:
            device, host = 0, host + device
        missing_device = device - int(DEVICE_SHARE * machine.device_bytes)
        missing_host = host * machine.ranks_per_host - int(HOST_SHARE * machine.host_bytes)
        return Candidate(choice, layout, counted, missing_device, missing_host)

    def evaluate(self, choice: PlanChoice) -> Candidate:
        """Return the choice with its bytes, and with its times if it fits."""
        counted = self.count(choice)
        times = simulate(self.model, self.machine, self.job, choice, counted.layout) if counted.fits else None
        return replace(counted, times=times)

    def variants(self, choice: PlanChoice) -> Iterator[Candidate]:
        """Yield the choice; then, if they help, a part of the state on the device, and both with spares."""
        plain = self.evaluate(choice)
        yield plain
        if not self.moves(choice) or plain.missing_device > 0:
            return  # the variants take more memory of a device
        bases = [choice] if plain.fits else []
        ratio = 1.0 if choice.streams else self._least_ratio(choice)
        if ratio < 1.0:
            bases.append(replace(choice, ratio=ratio))
            yield self.evaluate(bases[-1])
        for base in bases:
            spares = (replace(base, speculation=f"{percent}%") for percent in range(100, 0, -_SPARE_STEP_PERCENT))
            most = next((each for each in spares if self.count(each).fits), None)
            if most is not None:
                yield self.evaluate(most)

    def _least_ratio(self, choice: PlanChoice) -> float:
        """Return the smallest share on the host for which the device has room for the rest; 1.0: it has no room."""
        ratios = (step / _RATIO_STEPS for step in range(_RATIO_STEPS))
        fitting = (ratio for ratio in ratios if self.count(replace(choice, ratio=ratio)).missing_device <= 0)
        return next(fitting, 1.0) or 1.0  # with 0 all of the state would be on the device, which is no offload

    def hidden_at(self, choice: PlanChoice) -> int | None:
        """Return the fewest tokens in a step, over all ranks, at which at most a small share of the step is exposed.

        Batches are made larger whether or not their activations fit, since accumulation lengthens backward as well.
        """
        layout = self.count(choice).layout

        def hidden(sequences: int) -> bool:
            job = replace(self.job, batch_size=sequences, accumulation=1)
            times = simulate(self.model, self.machine, job, choice, layout)
            shown = times.exposed_s + (times.waited_s if choice.streams else 0.0)
            return shown <= HIDDEN_SHARE * times.step_s

        sequences = range(1, 1 + max(1, _MOST_TOKENS // self.job.seq_len))
        index = bisect_left(sequences, True, key=hidden)
        return None if index == len(sequences) else sequences[index] * self.job.seq_len * self.machine.ranks

    def refusal(self, candidates: Sequence[Candidate]) -> str:
        machine = self.machine
        nearest = min(
            candidates,
            key=lambda each: max(0, each.missing_device) * machine.ranks_per_host + max(0, each.missing_host),
        )
        # Without devices, activations are on the host, for each of its ranks.
        missing = nearest.missing_device if machine.staged else nearest.missing_host / machine.ranks_per_host
        advice = "more devices (--gpus, --hosts), a smaller model"
        if nearest.missing_host > 0:
            advice = f"more memory on each host (--host-memory), {advice}"
        if 0 < missing < nearest.bytes.device_estimates["activations"]:
            again = "" if self.job.checkpointing else ", --activation-checkpointing"
            advice = f"a smaller --batch-size or --seq-len{again}, or {advice}"
        if (smaller := self._smaller_states(candidates)) is not None:
            advice = f"{smaller}, {advice}"
        where = f"{format_byte_size(machine.device_bytes)} on each device and " if machine.staged else ""
        return (
            f"{self.model.name} ({self.model.numel:,} parameters) does not fit on {machine.name} with {where}"
            f"{format_byte_size(machine.host_bytes)} on each host; what comes nearest, {nearest.choice.title}, "
            f"{nearest.shortage}: try {advice}"
        )

    def _smaller_states(self, candidates: Sequence[Candidate]) -> str | None:
        """Return the option for a smaller format of states with which one of the choices fits; None: there is none."""
        formats = self.job.state_formats
        for format in formats[formats.index(self.job.state_format) + 1 :]:
            planner = replace(self, job=replace(self.job, states=format.value))
            for each in candidates:
                if planner.count(each.choice).fits:
                    return f"--states {format.value} ({each.choice.title} then fits)"
        return None

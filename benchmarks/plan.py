"""``longshore plan`` beside what happens: predicted steps of the engine, and the steps.

In each round this machine is measured anew, as ``longshore plan`` measures it, and each model trains a step, so that
whatever else the machine does hits both. The prediction of a round is made of that round's figures alone. All of it
runs on one thread, and by the CPU's time: other processes of a busy machine do not count, and with threads that wait
for each other they would.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import longshore
from benchmarks.llama import LlamaSize, make_llama, make_tokens
from benchmarks.report import Row, at_most, equal
from benchmarks.timing import Note
from longshore.plan.job import Job, PlanChoice, PlannedModel, PlannedParameter, Use
from longshore.plan.machine import Description, described
from longshore.plan.measurement import MachineProbe
from longshore.plan.planner import Planner, plan
from longshore.plan.reading import plan_of_module

PART = "Plan"
_CLOCK = time.process_time
_WARMUPS = 2
"""Rounds: the first step makes the state."""
_SECONDS_GOAL = 2.0
_TOLERANCE = 0.2


@dataclass(frozen=True)
class Settings:
    """``cases`` are hidden size, layers, inner size, tokens of a backward, and backwards a step."""

    cases: list[list[int]]
    numel: int
    rounds: int


class _Case:
    """One model, its engine, and its plan."""

    def __init__(self, case: list[int]) -> None:
        hidden, layers, inner, tokens, accumulation = case
        self.name = f"hidden {hidden}, {layers} layers, {tokens} tokens"
        self.name += f" x {accumulation}" if accumulation > 1 else ""
        model = make_llama(LlamaSize(hidden, layers, inner, max(tokens, 64)))
        self.planned = plan_of_module(model, self.name)
        self.job = Job(1, tokens, accumulation)
        self._tokens = make_tokens(tokens)
        config = longshore.Config(
            stage=2,
            offload_device="cpu",
            gradient_clipping=1.0,
            gradient_accumulation_steps=accumulation,
            threads=1,
            optimizer={"type": "AdamW", "lr": 1e-4},  # pyright: ignore[reportArgumentType]
        )
        self.engine = longshore.initialize(model=model, config=config).engine
        self.rounds: list[dict[str, float]] = []

    def step(self) -> dict[str, float]:
        """Seconds of one step, and of what comes after its last backward."""
        start = middle = _CLOCK()
        for _ in range(self.job.accumulation):
            self.engine.backward(self.engine(input_ids=self._tokens, labels=self._tokens).loss)
            middle = _CLOCK()
            self.engine.step()
        end = _CLOCK()
        return {"step_s": end - start, "exposed_s": end - middle}


def measure(values: Mapping[str, Any], note: Note) -> dict[str, Any]:
    """Each round's measured and predicted seconds, by case; ``values`` are those of :class:`Settings`."""
    settings = Settings(**values)
    cases = [_Case(case) for case in settings.cases]
    tokens = sorted({32, 512, *(case.job.tokens for case in cases)})
    probe = MachineProbe(torch.bfloat16, tokens, max(tokens), 1, settings.numel, 1, _CLOCK)
    for number in range(-_WARMUPS, settings.rounds):
        note(f"round {number + 1} of {settings.rounds}" if number >= 0 else "warming up")
        machine = probe.measure(1)
        for case in cases if number % 2 == 0 else reversed(cases):
            measured = case.step()
            times = Planner(case.planned, machine, case.job).evaluate(PlanChoice(2, "cpu")).times
            assert times is not None
            if number >= 0:
                predicted = {"predicted_step_s": times.step_s, "predicted_exposed_s": times.exposed_s}
                case.rounds.append({**measured, **predicted})
    for case in cases:
        case.engine.destroy()
    note("planning 400 billion parameters")
    return {
        "settings": vars(settings),
        "cases": {case.name: case.rounds for case in cases},
        "large_s": [_large() for _ in range(5)],
    }


def _large() -> float:
    """Seconds of planning 400 B parameters on 1,024 ranks."""
    made = [PlannedParameter("embed", (128256, 16384), torch.bfloat16, Use.LOOKED_UP)]
    for layer in range(126):
        for name, shape in (
            *((name, (16384, 16384)) for name in "qkvo"),
            *((name, (50000, 16384)) for name in ("gate", "up", "down")),
        ):
            made.append(PlannedParameter(f"{layer}.{name}", shape, torch.bfloat16, Use.MULTIPLIED, layer))
    made.append(PlannedParameter("head", (128256, 16384), torch.bfloat16, Use.HEAD))
    model = PlannedModel("large", tuple(made), 16384, 126 * 16384)
    machine = described(Description("h200", 8, 128, 2 * 10**12, 400e9, 50e9))
    start = _CLOCK()
    plan(model, machine, Job(1, 8192, 4, checkpointing=True))
    return _CLOCK() - start


def compared(what: str, rounds: Sequence[Mapping[str, float]], kind: str) -> Row:
    """The median over rounds of the predicted over the measured seconds."""
    ratio = statistics.median(each[f"predicted_{kind}"] / each[kind] for each in rounds)
    measured = 1e3 * statistics.median(each[kind] for each in rounds)
    return equal(PART, f"{what} over the measured one", ratio, "", 1.0, _TOLERANCE, f"measured {measured:.0f} ms")


def rows(results: Mapping[str, Any]) -> list[Row]:
    """Predicted over measured, with the goal."""
    table = []
    for name, rounds in results["cases"].items():
        for kind, words in (("step_s", "step"), ("exposed_s", "exposed time")):
            table.append(compared(f"{name}: predicted {words}", rounds, kind))
    large = statistics.median(results["large_s"])
    return [*table, at_most(PART, "planning 400 B parameters on 1,024 ranks", large, "s", _SECONDS_GOAL)]

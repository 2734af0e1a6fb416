"""``longshore plan`` beside what happens on two ranks of this machine, at stages 2 and 3.

By the wall's clock, since ranks wait for each other: it wants a machine that does nothing else. In each round the
machine is measured, as ``longshore plan`` measures it, and each model trains a step at each stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import plan
from benchmarks.contestants import ENGINE, ENGINE_3, MAX_NORM, Setup
from benchmarks.report import Row
from benchmarks.team import Team
from benchmarks.timing import Note
from longshore.plan.job import Job, PlanChoice, PlannedModel
from longshore.plan.machine import PlanMachine
from longshore.plan.measurement import MachineProbe
from longshore.plan.planner import Planner
from longshore.plan.reading import plan_of_module

PART = plan.PART
RANKS = 2
STAGES = {ENGINE: 2, ENGINE_3: 3}
_BUCKET_NUMEL = 50_000_000
_PASSES = 3
"""Of what is measured, in each round: as many as ``longshore plan`` makes."""


@dataclass(frozen=True)
class Settings:
    """``cases`` are hidden size, layers, inner size, and tokens of a backward; ``threads`` those of both ranks."""

    cases: list[list[int]]
    numel: int
    threads: int
    rounds: int


class _Case:
    """One model, its ranks, and its plan."""

    def __init__(self, case: list[int], threads: int, stack: ExitStack) -> None:
        hidden, layers, inner, self.tokens = case
        self.name = f"hidden {hidden}, {layers} layers, {self.tokens} tokens"
        setup = Setup(hidden, layers, inner, self.tokens, threads, _BUCKET_NUMEL)
        self._planned: PlannedModel = plan_of_module(setup.llama(), self.name)
        self._team = stack.enter_context(Team("time", setup, list(STAGES), RANKS))
        self._team.wait_until_ready()
        self.rounds: dict[str, list[dict[str, float]]] = {name: [] for name in STAGES}

    def round(self, machine: PlanMachine, counts: bool) -> None:
        answers = self._team.ask(1)
        job = Job(1, self.tokens, 1, clipping=MAX_NORM, bucket_numel=_BUCKET_NUMEL)
        for name, stage in STAGES.items() if counts else ():
            times = Planner(self._planned, machine, job).evaluate(PlanChoice(stage, "cpu")).times
            assert times is not None
            measured = max(answer[name][0] for answer in answers)
            self.rounds[name].append({"step_s": measured, "predicted_step_s": times.step_s})


def measure(values: Mapping[str, Any], note: Note) -> dict[str, Any]:
    """Each round's measured and predicted seconds, by case and contestant; ``values``: of :class:`Settings`."""
    settings = Settings(**values)
    torch.set_num_threads(settings.threads)
    tokens = sorted({32, 512, *(case[-1] for case in settings.cases)})
    probe = MachineProbe(torch.bfloat16, tokens, max(tokens), RANKS, settings.numel, settings.threads)
    with ExitStack() as stack:
        note("starting ranks")
        cases = [_Case(case, max(1, settings.threads // RANKS), stack) for case in settings.cases]
        for number in range(-1, settings.rounds):  # the first step makes the state
            note(f"{RANKS} ranks: round {number + 1} of {settings.rounds}")
            machine = probe.measure(_PASSES)
            for case in cases if number % 2 == 0 else reversed(cases):
                case.round(machine, number >= 0)
    return {"settings": vars(settings), "cases": {case.name: case.rounds for case in cases}}


def rows(results: Mapping[str, Any]) -> list[Row]:
    """Predicted over measured, with the goal."""
    table = []
    for case, by_name in results["cases"].items():
        for name, rounds in by_name.items():
            what = f"{RANKS} ranks, stage {STAGES[name]}, {case}: predicted step"
            table.append(plan.compared(what, rounds, "step_s"))
    return table

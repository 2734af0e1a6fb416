"""Parameters that rest in host memory at stage 3: a whole step, and memory, beside FSDP2 and DeepSpeed, on the CPU.

All train the same Llama in bfloat16 with float32 masters, on 32 tokens, where what they do with parameters and states
dominates. Each has processes of its own, and blocks of steps alternate. On the CPU nothing is copied to a device; what
is left is gathering, reducing, clipping and stepping.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.contestants import DEEPSPEED_RESTING, ENGINE_RESTING, FORWARD_BACKWARD, FSDP2_RESTING, Setup
from benchmarks.engine import ready_teams
from benchmarks.report import Row, at_most
from benchmarks.team import Team
from benchmarks.timing import Note, difference, paired_ratio, summary

PART = "parameters on the host, CPU"
TOKENS = 32
WORLD_SIZES = (1, 2)
GOALS = {DEEPSPEED_RESTING: 0.5, FSDP2_RESTING: 0.8}


@dataclass(frozen=True)
class Settings:
    """The Llama's size, ``threads`` of all ranks together, and ``blocks`` of ``steps`` each."""

    hidden_size: int
    layers: int
    intermediate_size: int
    bucket_numel: int
    threads: int
    blocks: int
    steps: int
    deepspeed_python: str


def measure(values: Mapping[str, Any], note: Note) -> dict[str, Any]:
    settings = Settings(**values)
    missing: dict[str, str] = {}
    times: dict[str, Any] = {}
    memory: dict[str, Any] = {}
    for world_size in WORLD_SIZES:
        times[str(world_size)] = _times(settings, world_size, missing, note)
        memory[str(world_size)] = _memory(settings, world_size, missing, note)
    shown = {name: value for name, value in asdict(settings).items() if name != "deepspeed_python"}  # a path
    return {"settings": shown, "missing": missing, "times": times, "memory": memory}


def _team(job: str, name: str, settings: Settings, world_size: int) -> Team:
    size = settings.hidden_size, settings.layers, settings.intermediate_size, TOKENS
    setup = Setup(*size, max(1, settings.threads // world_size), settings.bucket_numel)
    python = settings.deepspeed_python if name == DEEPSPEED_RESTING else sys.executable
    # Of several ranks, forward and backward alone would run beside another rank's.
    alone = (FORWARD_BACKWARD,) if job == "time" and world_size == 1 else ()
    return Team(job, setup, (*alone, name), world_size, python)


def _times(settings: Settings, world_size: int, missing: dict[str, str], note: Note) -> dict[str, Any]:
    """Seconds of each step of the slowest rank, by contestant; on one rank also of forward and backward alone, beside
    it."""
    seconds: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        names = [name for name in (ENGINE_RESTING, *GOALS) if name not in missing]
        started = {name: stack.enter_context(_team("time", name, settings, world_size)) for name in names}
        teams = ready_teams(started, missing)
        for block in range(-1, settings.blocks):  # the first one makes the optimizers' state
            note(f"ranks: {world_size}, block {block + 1} of {settings.blocks}")
            for name in teams if block % 2 == 0 else reversed(teams):
                answers = teams[name].ask(settings.steps)
                for case in answers[0] if block >= 0 else ():
                    slowest = [max(step) for step in zip(*(answer[case] for answer in answers), strict=True)]
                    seconds.setdefault(name, {}).setdefault(case, []).extend(slowest)
    return {name: {case: summary(found) for case, found in cases.items()} for name, cases in seconds.items()}


def _memory(settings: Settings, world_size: int, missing: dict[str, str], note: Note) -> dict[str, Any]:
    """Bytes by which a rank's process grew, for each of the model's parameters; the fullest rank counts."""
    found = {}
    for name in (ENGINE_RESTING, *GOALS):
        if name not in missing:
            note(f"ranks: {world_size}, memory of {name}")
            with _team("memory", name, settings, world_size) as team:
                for ready in ready_teams({name: team}, missing).values():
                    answers = ready.ask(1)
                    found[name] = max(answer["resident_growth_bytes"] / answer["parameters"] for answer in answers)
    return found


def rows(results: Mapping[str, Any]) -> list[Row]:
    table = [Row(PART, name, None, "", note=reason) for name, reason in results["missing"].items()]
    for world_size, times in results["times"].items():
        where = "1 rank" if world_size == "1" else f"{world_size} ranks"
        for name, goal in GOALS.items():
            if ENGINE_RESTING in times and name in times:
                ours, theirs = times[ENGINE_RESTING][ENGINE_RESTING], times[name][name]
                ratio = paired_ratio(ours["rounds_s"], theirs["rounds_s"])
                note = f"{1e3 * ours['median_s']:.0f} ms, {1e3 * theirs['median_s']:.0f} ms"
                table.append(at_most(PART, f"{where}: a whole step, over that of {name}", ratio, "x", goal, note))
        for name, cases in times.items():
            if FORWARD_BACKWARD in cases:
                added = difference(cases[name]["rounds_s"], cases[FORWARD_BACKWARD]["rounds_s"])
                what = f"{where}: {name} adds to forward and backward alone"
                table.append(Row(PART, what, 1e3 * statistics.median(added), "ms"))
        for name, grown in results["memory"][world_size].items():
            what = f"{where}: {name}: resident growth for each of the model's parameters"
            table.append(Row(PART, what, grown, "B"))
    return table

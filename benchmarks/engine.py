"""The engine: ZeRO-2 and 3 with cpu offload and clipping, in bfloat16, beside the one-line optimizer and DeepSpeed.

Every contestant trains the same Llama on 32 tokens, where the optimizer
dominates. Contestants of one interpreter share a process and run in turn, step
by step; DeepSpeed has processes of its own, and blocks of steps alternate.

* One rank: what does the step add to forward and backward alone, each in the
  same process?
* Two gloo ranks, each with its part of the threads: how long are whole steps, at stages 2 and 3?
* Memory: what the engine counts on a simulated device, what processes grew by,
  and what the engine keeps on the device during backward beyond what forward
  and backward take where every gradient is let go of as it comes.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.contestants import (
    DEEPSPEED,
    DEEPSPEED_3,
    ENGINE,
    ENGINE_3,
    FORWARD_BACKWARD,
    ONE_LINE,
    SIMULATED,
    Setup,
)
from benchmarks.floor import NotAvailable
from benchmarks.report import Row, at_least, at_most, equal
from benchmarks.team import Team
from benchmarks.timing import Note, difference, summary

PART = "Engine"
TOKENS = 32
OURS = {1: (FORWARD_BACKWARD, ONE_LINE, ENGINE), 2: (ENGINE, ENGINE_3)}
THEIRS = {1: {DEEPSPEED: (FORWARD_BACKWARD, DEEPSPEED)}, 2: {DEEPSPEED: (DEEPSPEED,), DEEPSPEED_3: (DEEPSPEED_3,)}}
"""Who is timed, by the number of ranks; of theirs, each team has processes of its own."""
COUNTED_GOAL = {1: 14.0, 2: 16.0}
"""Host bytes for each parameter that a rank owns, by the number of ranks: several reduce gradients in float32."""
BUCKETS_ON_DEVICE = 2
GRADIENT_BYTES = 2


@dataclass(frozen=True)
class Settings:
    """The Llama's size, elements of a bucket, ``threads`` of all ranks together, and ``blocks`` of ``steps`` each.

    ``memory_bucket_numel`` is smaller, so that two buckets are far from all gradients, and no smaller than the largest
    parameter.
    """

    hidden_size: int
    layers: int
    intermediate_size: int
    bucket_numel: int
    memory_bucket_numel: int
    threads: int
    blocks: int
    steps: int
    deepspeed_python: str

    def setup(self, world_size: int, bucket_numel: int) -> Setup:
        threads = max(1, self.threads // world_size)
        return Setup(self.hidden_size, self.layers, self.intermediate_size, TOKENS, threads, bucket_numel)


def measure(values: Mapping[str, Any], note: Note) -> dict[str, Any]:
    """Times and memory by the number of ranks; ``values`` are those of :class:`Settings`."""
    settings = Settings(**values)
    times: dict[str, Any] = {}
    memory: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for world_size in OURS:
        times[str(world_size)] = _times(settings, world_size, missing, note)
    for world_size in OURS:
        memory[str(world_size)] = _memory(settings, world_size, missing, note)
    shown = {name: value for name, value in asdict(settings).items() if name != "deepspeed_python"}  # a path
    return {"settings": shown, "missing": missing, "times": times, "memory": memory}


def _times(settings: Settings, world_size: int, missing: dict[str, str], note: Note) -> dict[str, Any]:
    """Each team's contestants; of several ranks, the slowest counts."""
    where, setup = _ranks(world_size), settings.setup(world_size, settings.bucket_numel)
    note(f"{where}: starting")
    seconds: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        started = {ENGINE: stack.enter_context(Team("time", setup, OURS[world_size], world_size))}
        for name, contestants in THEIRS[world_size].items() if DEEPSPEED not in missing else ():
            team = Team("time", setup, contestants, world_size, settings.deepspeed_python)
            started[name] = stack.enter_context(team)
        teams = ready_teams(started, missing)
        for block in range(-1, settings.blocks):  # the first one makes the optimizers' state
            note(f"{where}: block {block + 1} of {settings.blocks}")
            for name in teams if block % 2 == 0 else reversed(teams):
                answers = teams[name].ask(settings.steps)
                for contestant in answers[0] if block >= 0 else ():
                    slowest = [max(step) for step in zip(*(answer[contestant] for answer in answers), strict=True)]
                    seconds.setdefault(name, {}).setdefault(contestant, []).extend(slowest)
    return {team: {name: summary(times) for name, times in cases.items()} for team, cases in seconds.items()}


def _memory(settings: Settings, world_size: int, missing: dict[str, str], note: Note) -> dict[str, Any]:
    """What each rank answers, by contestant."""
    setup = settings.setup(world_size, settings.memory_bucket_numel)
    measured = {}
    for name, python in ((SIMULATED, sys.executable), (DEEPSPEED, settings.deepspeed_python)):
        if name not in missing:
            note(f"{_ranks(world_size)}: memory of {name}")
            with Team("memory", setup, (name,), world_size, python) as team:
                for ready in ready_teams({name: team}, missing).values():
                    measured[name] = ready.ask(settings.steps)
    return measured


def ready_teams(teams: Mapping[str, Team], missing: dict[str, str]) -> dict[str, Team]:
    """Those that can run, once they are ready; ``missing`` says why the others cannot."""
    ready = {}
    for name, team in teams.items():
        try:
            team.wait_until_ready()
        except NotAvailable as reason:
            missing[name] = str(reason)
        else:
            ready[name] = team
    return ready


def _ranks(world_size: int) -> str:
    return f"{world_size} rank{'s' * (world_size > 1)}"


# -- the table ----------------------------------------------------------------


def rows(results: Mapping[str, Any]) -> list[Row]:
    """The figures of the table, with the goals of the engine."""
    missing, times, memory = results["missing"], results["times"], results["memory"]
    table = [Row(PART, name, None, "", note=reason) for name, reason in missing.items()]
    if ENGINE not in missing:
        table += _one_rank_rows(times["1"]) + _two_rank_rows(times["2"])
    if SIMULATED not in missing:
        bucket_bytes = GRADIENT_BYTES * results["settings"]["memory_bucket_numel"]
        for world_size in OURS:
            table += _memory_rows(world_size, memory[str(world_size)], bucket_bytes)
    return table


def _one_rank_rows(times: Mapping[str, Any]) -> list[Row]:
    def added(team: str, name: str) -> float:
        cases = times[team]
        return statistics.median(difference(cases[name]["rounds_s"], cases[FORWARD_BACKWARD]["rounds_s"]))

    engine, one_line = added(ENGINE, ENGINE), added(ENGINE, ONE_LINE)
    alone = times[ENGINE][FORWARD_BACKWARD]["median_s"]
    what = f"1 rank: the engine adds, of what the {ONE_LINE} adds"
    table = [
        Row(PART, f"1 rank: {FORWARD_BACKWARD}", 1e3 * alone, "ms"),
        Row(PART, f"1 rank: the {ONE_LINE} adds", 1e3 * one_line, "ms"),
        at_most(PART, what, engine / one_line, "", 1.15, f"adds {1e3 * engine:.0f} ms"),
    ]
    if DEEPSPEED in times:
        what = "1 rank: DeepSpeed adds, over what the engine adds"
        theirs = added(DEEPSPEED, DEEPSPEED)
        table.append(at_least(PART, what, theirs / engine, "x", 5.0, f"adds {1e3 * theirs:.0f} ms"))
    return table


def _two_rank_rows(times: Mapping[str, Any]) -> list[Row]:
    engine = times[ENGINE][ENGINE]["median_s"]
    table = [Row(PART, "2 ranks: whole step of the engine", 1e3 * engine, "ms")]
    if DEEPSPEED in times:
        what = "2 ranks: DeepSpeed's whole step over ours"
        theirs = times[DEEPSPEED][DEEPSPEED]["median_s"]
        table.append(at_least(PART, what, theirs / engine, "x", 2.0, f"{1e3 * theirs:.0f} ms"))
    stage_3 = times[ENGINE][ENGINE_3]["median_s"]
    what = "2 ranks: whole step at stage 3, over that at stage 2"
    table.append(at_most(PART, what, stage_3 / engine, "x", 1.3, f"{1e3 * stage_3:.0f} ms"))
    if DEEPSPEED_3 in times:
        what = "2 ranks: DeepSpeed's whole step at stage 3 over ours"
        theirs = times[DEEPSPEED_3][DEEPSPEED_3]["median_s"]
        table.append(at_least(PART, what, theirs / stage_3, "x", 2.0, f"{1e3 * theirs:.0f} ms"))
    return table


def _memory_rows(world_size: int, memory: Mapping[str, list[dict[str, Any]]], bucket_bytes: int) -> list[Row]:
    where, ours = _ranks(world_size), memory[SIMULATED]
    # The fullest rank counts.
    rank = max(ours, key=lambda rank: sum(rank["counted_bytes"].values()) / rank["owned"])
    counted = {kind: count / rank["owned"] for kind, count in rank["counted_bytes"].items()}
    note = ", ".join(f"{kind} {count:.2f}" for kind, count in counted.items() if count)
    counted.pop("staging", None)  # a few tiles, however many parameters there are
    staging = rank["counted_bytes"].get("staging", 0)
    note += f", staging {staging / 2**20:.0f} MiB in all" if staging else ""
    what = f"{where}: host bytes counted for each owned parameter"
    table = [equal(PART, what, sum(counted.values()), "B", COUNTED_GOAL[world_size], 0.05, note)]
    for name, answers in memory.items():
        grown = max(answer["resident_growth_bytes"] / answer["parameters"] for answer in answers)
        table.append(Row(PART, f"{where}: {name}: resident growth for each of the model's parameters", grown, "B"))
    kept = max(answer["gradients_bytes"] for answer in ours) / 2**20
    what = f"{where}: on the device in backward, besides parameters and activations"
    bound = BUCKETS_ON_DEVICE * bucket_bytes / 2**20
    note = f"goal: {BUCKETS_ON_DEVICE} buckets; all gradients: {GRADIENT_BYTES * rank['parameters'] / 2**20:.0f} MiB"
    return [*table, at_most(PART, what, kept, "MiB", bound, note)]

"""``python -m benchmarks``: measure, print the table, write the results."""

from __future__ import annotations

import dataclasses
import datetime
import sys
import time
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import (
    checkpoints,
    engine,
    host_memory,
    host_step,
    machine,
    many_parameters,
    muon,
    overlap,
    plan,
    plan_ranks,
    resting,
    streaming,
    tile_sizes,
    tracing,
    whole_step,
)
from benchmarks.child import PartFailed, measure_in_child
from benchmarks.report import Measured, Row, as_table, conclusion, write_results
from longshore.kernels import usable_cpus


class Part(str, Enum):
    """What can be measured."""

    host_step = "host-step"
    many_parameters = "many-parameters"
    tile_sizes = "tile-sizes"
    whole_step = "whole-step"
    host_memory = "host-memory"
    engine = "engine"
    overlap = "overlap"
    tracing = "tracing"
    checkpoints = "checkpoints"
    plan = "plan"
    stream = "stream"
    muon = "muon"


def _host_step(quick: bool, threads: int, python: str) -> tuple[Any, list[Row]]:
    settings = host_step.Settings(numel=1 << 20 if quick else 1 << 27, rounds=2 if quick else 15, threads=threads)
    results = measure_in_child("host_step", vars(settings), threads, python)
    return results, host_step.rows(results)


def _many_parameters(quick: bool, threads: int, python: str) -> tuple[Any, list[Row]]:
    counts, numels = ([100], [256]) if quick else ([100, 1_000, 10_000, 100_000], [256, 1024])
    large = [1 << 16] if quick else [1 << 24, 1 << 26, 1 << 28]
    settings = many_parameters.Settings(counts, numels, large, threads, 2 if quick else 15)
    results = measure_in_child("many_parameters", vars(settings), threads)
    return results, many_parameters.rows(results)


def _tile_sizes(quick: bool, threads: int, python: str) -> tuple[Any, list[Row]]:
    tiles, counts = ([1 << 20, 1 << 22], [1, 2]) if quick else ([1 << 20, 1 << 22, 1 << 24, 1 << 26], [1, 2, 4, 8])
    settings = tile_sizes.Settings(1 << 22 if quick else 1 << 26, tiles, counts, 2 if quick else 15)
    results = measure_in_child("tile_sizes", vars(settings), 1)
    return results, tile_sizes.rows(results)


def _whole_step(quick: bool, threads: int, python: str) -> tuple[Any, list[Row]]:
    if quick:
        settings = whole_step.Settings(128, 2, 256, threads, 8, 3, 32, 3)
    else:
        settings = whole_step.Settings(768, 12, 2432, threads, 32, 21, 2048, 9)
    results = measure_in_child("whole_step", vars(settings), threads)
    return results, whole_step.rows(results)


def _host_memory(quick: bool, threads: int, python: str) -> tuple[Any, list[Row]]:
    results = {}
    cases = host_memory.cases(2048, 4 if quick else 24, threads)
    for name, (settings, goal) in list(cases.items())[: 2 if quick else None]:
        results[name] = {**measure_in_child("host_memory", settings, threads), "goal": goal}
    return results, host_memory.rows(results)


def _engine(quick: bool, threads: int, python: str) -> tuple[Any, list[Row]]:
    if quick:
        settings = engine.Settings(128, 2, 256, 1 << 21, 1 << 21, threads, 1, 2, python)
    else:
        settings = engine.Settings(768, 12, 2432, 50_000_000, 1 << 24, threads, 5, 5, python)
    results = measure_in_child("engine", vars(settings), threads)
    return results, engine.rows(results)


def _overlap(quick: bool, threads: int, python: str) -> tuple[Any, list[Row]]:
    settings = overlap.Settings(8, 1 << 16, threads, 2) if quick else overlap.Settings(64, 1 << 21, threads, 15)
    results = measure_in_child("overlap", vars(settings), threads)
    return results, overlap.rows(results)


def _tracing(quick: bool, threads: int, python: str) -> tuple[Any, list[Row]]:
    settings = (
        tracing.Settings(128, 2, 256, threads, 8, 3) if quick else tracing.Settings(768, 12, 2432, threads, 32, 41)
    )
    results = measure_in_child("tracing", vars(settings), threads)
    return results, tracing.rows(results)


def _checkpoints(quick: bool, threads: int, python: str) -> tuple[Any, list[Row]]:
    if quick:
        settings = checkpoints.Settings(128, 2, 256, threads, 1)
    else:
        settings = checkpoints.Settings(768, 12, 2432, threads, 7)
    results = measure_in_child("checkpoints", vars(settings), threads)
    return results, checkpoints.rows(results)


def _plan(quick: bool, threads: int, python: str) -> tuple[Any, list[Row]]:
    if quick:
        settings = plan.Settings([[128, 2, 256, 32, 1]], 1 << 20, 2)
        of_ranks = plan_ranks.Settings([[128, 2, 256, 32]], 1 << 20, threads, 1)
    else:
        cases = [[512, 4, 1408, 32, 1], [512, 4, 1408, 512, 1], [768, 6, 2432, 128, 1], [512, 4, 1408, 128, 3]]
        settings = plan.Settings(cases, 1 << 25, 7)
        of_ranks = plan_ranks.Settings([case[:4] for case in cases[:3]], 1 << 25, threads, 7)
    results = measure_in_child("plan", vars(settings), threads=1)
    results["ranks"] = measure_in_child("plan_ranks", vars(of_ranks), threads)
    return results, plan.rows(results) + plan_ranks.rows(results["ranks"])


def _stream(quick: bool, threads: int, python: str) -> tuple[Any, list[Row]]:
    # So long that what the simulated accelerator itself takes does not count.
    settings = streaming.Settings(4, 64, 2.0, 1) if quick else streaming.Settings(32, 256, 20.0, 5)
    if quick:
        beside = resting.Settings(128, 2, 256, 1 << 21, threads, 1, 2, python)
    else:
        beside = resting.Settings(768, 12, 2432, 50_000_000, threads, 4, 3, python)
    results = measure_in_child("streaming", vars(settings), threads=1)
    results["beside"] = measure_in_child("resting", vars(beside), threads)
    return results, streaming.rows(results) + resting.rows(results["beside"])


def _muon(quick: bool, threads: int, python: str) -> tuple[Any, list[Row]]:
    if quick:
        settings = muon.Settings(64, 1, 176, threads, 2, 1 << 20, 4, 64)
    else:
        settings = muon.Settings(512, 8, 1376, threads, 9, 1 << 26)
    results = measure_in_child("muon", vars(settings), threads)
    return results, muon.rows(results)


_MEASURE = {
    Part.host_step: _host_step,
    Part.many_parameters: _many_parameters,
    Part.tile_sizes: _tile_sizes,
    Part.whole_step: _whole_step,
    Part.host_memory: _host_memory,
    Part.engine: _engine,
    Part.overlap: _overlap,
    Part.tracing: _tracing,
    Part.checkpoints: _checkpoints,
    Part.plan: _plan,
    Part.stream: _stream,
    Part.muon: _muon,
}


def main(
    part: Annotated[list[Part] | None, typer.Option(help="Measure this part only; may be given again.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small and short, to see that it runs.")] = False,
    threads: Annotated[int, typer.Option(min=1, help="Threads of every contestant.")] = len(usable_cpus()),
    out: Annotated[Path | None, typer.Option(help="Folder for the results, as JSON and as a table.")] = None,
    deepspeed_python: Annotated[
        str,
        typer.Option(
            envvar="LONGSHORE_BENCH_DEEPSPEED_PYTHON",
            help="Interpreter that has deepspeed, transformers and longshore, where another one does.",
        ),
    ] = sys.executable,
) -> None:
    """Measure longshore against plain torch, DeepSpeed and what the memory of this machine can do."""
    console, started = Console(), time.monotonic()
    if not console.is_terminal:
        console.width = 160
    described = {**machine.describe(), "threads": threads, "load_average_before": machine.load_average()}
    results: dict[str, Any] = {}
    rows: list[Row] = []
    failed: list[str] = []
    for which in part or list(Part):
        try:
            results[which.value], added = _MEASURE[which](quick, threads, deepspeed_python)
            rows += added
        except PartFailed as failure:
            failed.append(which.value)
            rows.append(Row(which.value, f"all of {which.value}", None, "", note=str(failure)))
    if quick:
        rows = [dataclasses.replace(row, verdict="", note=f"(--quick) {row.note}") for row in rows]
    described["load_average_after"] = machine.load_average()
    for key, value in described.items():
        console.print(f"{key.replace('_', ' ')}: {value}", highlight=False, markup=False)
    console.print(as_table(rows))
    said = [f"FAILED, did not run: {', '.join(failed)}"] if failed else []
    said.append("--quick: too small to say anything, no goal is judged" if quick else conclusion(rows))
    said.append(f"{time.monotonic() - started:.0f} s")
    if out is not None:
        stem = f"{datetime.date.today().isoformat()}-cpu-{machine.short_cpu_name()}"
        write_results(out, stem, str(described["cpu"]), Measured(described, results, rows))
    console.print("; ".join(said), highlight=False, markup=False)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

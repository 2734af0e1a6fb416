"""Steps of models with many small parameters, beside torch's fused AdamW: what a step costs for each tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

import longshore
from benchmarks.report import Row, at_most
from benchmarks.timing import Case, Note, interleave, least_ratio, paired_ratio, summary

PART = "many parameters"


@dataclass(frozen=True)
class Settings:
    """Numbers of parameters, and of elements of each; every pair is measured."""

    counts: list[int]
    numels: list[int]
    threads: int
    rounds: int


def _steps(count: int, numel: int, threads: int) -> dict[str, Callable[[], None]]:
    """Our step and torch's on float32 parameters that all have a gradient."""
    steps: dict[str, Callable[[], None]] = {}
    for name in ("ours", "torch"):
        parameters = [torch.nn.Parameter(torch.randn(numel)) for _ in range(count)]
        if name == "ours":
            optimizer = longshore.AdamW(parameters, offload=longshore.Offload(threads=threads))
        else:
            optimizer = torch.optim.AdamW(parameters, fused=True)
        for parameter in parameters:
            parameter.grad = torch.randn(numel)
        calls = max(1, 10_000 // count)

        def run(step: Callable[[], Any] = optimizer.step, calls: int = calls) -> None:
            for _ in range(calls):
                step()

        steps[name] = run
    return steps


def measure(values: Mapping[str, Any], note: Note) -> dict[str, Any]:
    settings = Settings(**values)
    torch.set_num_threads(settings.threads)
    times: dict[str, Any] = {}
    for numel in settings.numels:
        for count in settings.counts:
            note(f"{count:,} parameters of {numel:,} elements")
            cases = {name: Case(step) for name, step in _steps(count, numel, settings.threads).items()}
            seconds = interleave(cases, settings.rounds, note, warmups=2)
            times[f"{count}x{numel}"] = {
                "count": count,
                "numel": numel,
                "steps": max(1, 10_000 // count) * count,
                **{name: summary(found) for name, found in seconds.items()},
            }
    return {"settings": asdict(settings), "torch": torch.__version__, "times": times}


def rows(results: Mapping[str, Any]) -> list[Row]:
    """A row for each number and size: our time over torch's."""
    table = []
    for entry in results["times"].values():
        ours, torchs = entry["ours"]["rounds_s"], entry["torch"]["rounds_s"]
        each = {name: 1e6 * entry[name]["median_s"] / entry["steps"] for name in ("ours", "torch")}
        note = (
            f"{each['ours']:.2f} us a tensor, torch's {each['torch']:.2f}; best rounds: {least_ratio(ours, torchs):.3g}"
        )
        what = f"step of {entry['count']:,} parameters of {entry['numel']:,}: its time over torch's fused"
        table.append(at_most(PART, what, paired_ratio(ours, torchs), "x", 1.0, note))
    return table

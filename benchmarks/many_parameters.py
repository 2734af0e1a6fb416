"""Steps of many small parameters, and of a large one, beside torch's fused AdamW: what a step costs for each tensor,
and for each element of a float32 parameter that is its own master."""

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
    """Numbers of parameters, and of elements of each; every pair is measured, and one of each ``large`` number."""

    counts: list[int]
    numels: list[int]
    large: list[int]
    threads: int
    rounds: int


def _calls(count: int, numel: int) -> int:
    """Return how many steps are timed together."""
    return max(1, min(10_000 // count, (1 << 28) // (count * numel)))


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

        def run(step: Callable[[], Any] = optimizer.step) -> None:
            for _ in range(_calls(count, numel)):
                step()

        steps[name] = run
    return steps


def measure(values: Mapping[str, Any], note: Note) -> dict[str, Any]:
    settings = Settings(**values)
    torch.set_num_threads(settings.threads)
    times: dict[str, Any] = {}
    pairs = [(count, numel) for numel in settings.numels for count in settings.counts]
    for count, numel in pairs + [(1, numel) for numel in settings.large]:
        note(f"{count:,} parameters of {numel:,} elements")
        cases = {name: Case(step) for name, step in _steps(count, numel, settings.threads).items()}
        seconds = interleave(cases, settings.rounds, note, warmups=2)
        times[f"{count}x{numel}"] = {
            "count": count,
            "numel": numel,
            "steps": _calls(count, numel) * count,
            **{name: summary(found) for name, found in seconds.items()},
        }
    return {"settings": asdict(settings), "torch": torch.__version__, "times": times}


def rows(results: Mapping[str, Any]) -> list[Row]:
    """A row for each number and size: our time over torch's."""
    table = []
    for entry in results["times"].values():
        ours, torchs = entry["ours"]["rounds_s"], entry["torch"]["rounds_s"]
        alone = entry["count"] == 1
        unit, scale = ("ns an element", 1e9 / entry["numel"]) if alone else ("us a tensor", 1e6)
        each = {name: scale * entry[name]["median_s"] / entry["steps"] for name in ("ours", "torch")}
        note = f"{each['ours']:.3g} {unit}, torch's {each['torch']:.3g}; best rounds: {least_ratio(ours, torchs):.3g}"
        what = f"step of {entry['count']:,} parameters of {entry['numel']:,}: its time over torch's fused"
        table.append(at_most(PART, what, paired_ratio(ours, torchs), "x", 1.0, note))
    return table

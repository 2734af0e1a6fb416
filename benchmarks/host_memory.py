"""Host memory a parameter: what the optimizer counts, and what the process really grew by.

A stack of square bfloat16 matrices is trained on a few rows. Resident memory is
read before the optimizer exists, after a backward whose gradients were let go
of, and again after three steps; the growth must be what ``host_bytes()``
counts. Each case runs in a process of its own.

Where the transfer stages (a device; here the simulated one, without delays)
the gradients have slots on the host. With CPU parameters (direct) there are
none: released gradients are held, and counted, from backward to ``step()``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import longshore
from benchmarks.memory import load_torch_optimizers, resident_bytes
from benchmarks.report import Row, at_most, equal
from benchmarks.timing import Note

PART = "Host memory"
STEPS = 3
TOLERANCE = 1.5


@dataclass(frozen=True)
class Settings:
    """One case: ``layers`` matrices of ``width`` squared; when to look: ``step`` or ``backward``, the last one; and the
    format of the states."""

    width: int
    layers: int
    threads: int
    staged: bool
    release_gradients: bool
    backwards: int
    look_after: str = "step"
    states: str = "fp32"


def cases(width: int, layers: int, threads: int) -> dict[str, tuple[dict[str, Any], float]]:
    """Each case's settings, and the bytes a parameter that it should count."""

    def case(
        staged: bool, release_gradients: bool, backwards: int, look_after: str = "step", states: str = "fp32"
    ) -> dict[str, Any]:
        return asdict(Settings(width, layers, threads, staged, release_gradients, backwards, look_after, states))

    return {
        "released gradients, one backward": (case(True, True, 1), 14.0),
        "released gradients, one backward, bf16 states": (case(True, True, 1, states="bf16"), 10.0),
        "released gradients, one backward, 8bit states": (case(True, True, 1, states="8bit"), 8.125),
        "released gradients, two backwards": (case(True, True, 2), 18.0),
        "direct, .grad": (case(False, False, 1), 12.0),
        "direct, released, between backward and step": (case(False, True, 1, "backward"), 14.0),
        "direct, released, after the step": (case(False, True, 1), 12.0),
    }


def measure(values: Mapping[str, Any], note: Note) -> dict[str, Any]:
    """One case; ``values`` are those of :class:`Settings`."""
    settings = Settings(**values)
    torch.set_num_threads(settings.threads)
    torch.manual_seed(0)
    note(f"{settings.layers * settings.width**2:,} parameters")
    matrices = [nn.Linear(settings.width, settings.width, bias=False) for _ in range(settings.layers)]
    model = nn.Sequential(*matrices).bfloat16()
    inputs = torch.randn(4, settings.width, dtype=torch.bfloat16)

    def backward() -> None:
        model(inputs).float().square().mean().backward()

    backward()
    model.zero_grad()
    load_torch_optimizers()
    before = resident_bytes()
    transfer = longshore.SimulatedTransfer(max_delay_s=0) if settings.staged else None
    optimizer = longshore.AdamW(
        model.parameters(),
        lr=1e-5,
        release_gradients=settings.release_gradients,
        offload=longshore.Offload(threads=settings.threads, transfer=transfer, states=settings.states),
    )
    for _ in range(STEPS):
        for _ in range(settings.backwards):
            backward()
        optimizer.step()
        optimizer.zero_grad()
    if settings.look_after == "backward":
        backward()
    grown = resident_bytes() - before
    numel = sum(parameter.numel() for parameter in model.parameters())
    counted = optimizer.host_bytes()
    return {
        "settings": asdict(settings),
        "parameters": numel,
        "counted_bytes": counted,
        "counted_per_parameter": {kind: count / numel for kind, count in counted.items()},
        "resident_growth_bytes": grown,
        "resident_growth_per_parameter": grown / numel,
    }


def rows(results: Mapping[str, Any]) -> list[Row]:
    """The figures of the table; ``results`` maps each case's name to what it measured and its goal."""
    table = []
    for name, result in results.items():
        kinds = result["counted_per_parameter"]
        total = sum(kinds.values())
        grown = result["resident_growth_per_parameter"]
        note = ", ".join(f"{kind} {count:.2f}" for kind, count in kinds.items() if count)
        of_parameters = total - kinds.get("staging", 0.0)  # which does not grow with the model
        table.append(equal(PART, f"{name}: counted, without staging", of_parameters, "B", result["goal"], 0.05, note))
        what = f"{name}: resident growth, off by"
        table.append(at_most(PART, what, abs(grown - total), "B", TOLERANCE, f"grew by {grown:.2f} B"))
    return table

"""Models and machines for plans, made of numbers alone."""

from __future__ import annotations

from typing import Any

import torch

from longshore.plan.job import PlannedModel, PlannedParameter, Use
from longshore.plan.machine import Description, PlanMachine, described

GB = 10**9


def llama(
    layers: int, hidden: int, inner: int, vocabulary: int, name: str = "llama", tied: bool = False
) -> PlannedModel:
    """As transformers registers it."""
    made: list[PlannedParameter] = []

    def add(what: str, shape: tuple[int, ...], use: Use, unit: int | None = None) -> None:
        made.append(PlannedParameter(what, shape, torch.bfloat16, use, unit))

    add("embed", (vocabulary, hidden), Use.HEAD if tied else Use.LOOKED_UP)
    for layer in range(layers):
        for what in "qkvo":
            add(f"layers.{layer}.{what}", (hidden, hidden), Use.MULTIPLIED, layer)
        add(f"layers.{layer}.gate", (inner, hidden), Use.MULTIPLIED, layer)
        add(f"layers.{layer}.up", (inner, hidden), Use.MULTIPLIED, layer)
        add(f"layers.{layer}.down", (hidden, inner), Use.MULTIPLIED, layer)
        add(f"layers.{layer}.norm", (hidden,), Use.ELEMENTWISE, layer)
    add("norm", (hidden,), Use.ELEMENTWISE)
    if not tied:
        add("head", (vocabulary, hidden), Use.HEAD)
    return PlannedModel(name, tuple(made), hidden, layers * hidden)


def machine(gpu: str = "h200", gpus: int = 1, hosts: int = 1, **figures: Any) -> PlanMachine:
    given = {"host_memory_bytes": 2000 * GB, "host_bytes_per_s": 400e9, "link_bytes_per_s": 50e9, **figures}
    return described(Description(gpu, gpus, hosts, **given))


SMALL = llama(4, 256, 704, 1000, "small")
EIGHT = llama(32, 4096, 14336, 128256, "8B")
FOUR_HUNDRED = llama(126, 16384, 50000, 128256, "400B")

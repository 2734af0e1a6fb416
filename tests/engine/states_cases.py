"""Ranks that were given different formats of states."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import longshore
from engine.failure_cases import raised_by


def wide_model() -> nn.Sequential:
    """Two matrices whose states may have 8 bits, and a norm and biases, whose states may not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 64))


def set_up_with(fields: list[dict[str, Any]], by_offload: bool) -> str:
    """Make an engine with this rank's fields, of the configuration or of an Offload."""
    own = fields[dist.get_rank()]
    options: dict[str, Any] = {"offload": longshore.Offload(**own)} if by_offload else {}
    config = longshore.Config(stage=2, optimizer={"type": "AdamW"}, **({} if by_offload else own))  # type: ignore[arg-type]

    def start() -> None:
        longshore.initialize(model=wide_model(), config=config, **options).engine.destroy()

    return raised_by(start)


def formats(stage: int) -> dict[str, tuple[int, int]]:
    """The formats that explain() counts, and its line."""
    config = longshore.Config(stage=stage, states="8bit", optimizer={"type": "AdamW"})  # type: ignore[arg-type]
    engine = longshore.initialize(model=wide_model(), config=config).engine
    found = engine.explain(print_it=False).states_by_format
    engine.destroy()
    return {name: tuple(count) for name, count in found.items()}

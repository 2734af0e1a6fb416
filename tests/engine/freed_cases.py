"""Engines whose memory is counted."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from freed import private_bytes, steps_break_half_way, without_collector
from torch import nn

import longshore
from longshore.optim.tiled_optimizer import core_of

LONG, SHORT = 9216, 64
"""Sides of a matrix whose states are whole huge pages, in each format and in halves. A step of Muon costs the cube of
the shorter."""


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(LONG, SHORT), nn.Linear(SHORT, LONG, bias=False))


def configuration(stage: int = 2, states: str = "fp32", super_offload: bool = False, **keys: Any) -> dict[str, Any]:
    offload = {"device": "cpu", "states": states, "super_offload": super_offload}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "offload_optimizer": offload},
        **keys,
    }


def start(client: bool = False, **settings: Any) -> Any:
    model, config = network(), configuration(**settings)
    optimizer = None
    if client:
        del config["optimizer"]
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return longshore.initialize(model=model, config=config, optimizer=optimizer).engine


def train(engine: Any) -> None:
    for _ in range(2 * engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.ones(1, LONG)).square().mean())
        engine.step()


def destroyed(stage: int) -> int:
    """The bytes that stay when an engine was destroyed, and that its user still has."""
    with without_collector():
        before = private_bytes()
        engine = start(stage=stage)
        train(engine)
        assert private_bytes() - before >= 2 * LONG * SHORT
        engine.destroy()
        return private_bytes() - before


def refused(stage: int) -> bool:
    """Whether anything keeps the store of an engine whose last step was refused, once its user has neither."""
    with without_collector():
        engine = start(stage=stage)
        train(engine)
        engine.backward(engine(torch.ones(1, LONG)).square().mean())
        engine.optimizer.param_groups[0]["lr"] = -1.0
        for kind in (ValueError, longshore.GradientError):
            with pytest.raises(kind, match="lr must be"):
                engine.step()
        store = weakref.ref(core_of(engine.optimizer).members.store)
        engine.destroy()
        del engine
        return store() is not None


def broke_half_way(stage: int) -> int:
    """The bytes that stay of an engine that is gone, and whose last step broke half way."""
    with without_collector():
        before = private_bytes()
        engine = start(stage=stage)
        train(engine)
        with steps_break_half_way(), pytest.raises(RuntimeError, match="no more"):
            train(engine)
        for _ in range(2):
            with pytest.raises(longshore.BrokenStateError, match="an earlier step failed half way"):
                train(engine)
        assert private_bytes() > before
        del engine
        return private_bytes() - before

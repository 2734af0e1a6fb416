"""A second engine, or optimizer, for parameters that the first one still has; run on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from freed import without_collector
from support import PlainLoop, whole
from torch import Tensor, nn

import longshore
from engine.failure_cases import raised_by

OPTIONS: dict[str, Any] = {"lr": 2e-2, "weight_decay": 0.05}


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def engine_for(model: nn.Module, stage: int) -> Any:
    config = longshore.Config(stage=stage, optimizer={"type": "AdamW", **OPTIONS})  # pyright: ignore
    return longshore.initialize(model=model, config=config).engine


class Plain:
    """What the models have to equal: a new optimizer for each engine."""

    def __init__(self) -> None:
        self.model = make()
        self.loop = self.new()

    def new(self) -> PlainLoop:
        self.loop = PlainLoop(self.model.parameters(), **OPTIONS)
        return self.loop

    def step(self, step: int) -> None:
        parameters, size = [*self.model.parameters()], world()[1]
        by_rank = [torch.autograd.grad(_loss(self.model, step, rank), parameters) for rank in range(size)]
        self.loop.step([torch.stack(each).sum(0) * (1.0 / size) for each in zip(*by_rank, strict=True)])

    def check(self, model: nn.Module) -> None:
        for ours, theirs in zip(model.parameters(), self.model.parameters(), strict=True):
            assert torch.equal(whole(ours), theirs)


def _loss(model: Any, step: int, rank: int) -> Tensor:
    return model(batch(step, rank)).square().mean()


def train(engine: Any, plain: Plain, steps: range, raw: bool = False) -> None:
    for step in steps:
        loss = _loss(engine, step, world()[0])
        loss.backward() if raw else engine.backward(loss)
        engine.step()
        plain.step(step)
    plain.check(engine.module)


def cell_run_again(stage: int) -> None:
    """The same names again, as a notebook's cell has them: the former engine goes when the new one is there."""
    model, plain = make(), Plain()
    with without_collector():  # what is in a cycle stays, as it may in a notebook
        for turn in range(3):
            engine = engine_for(model, stage)
            plain.new()
            train(engine, plain, range(2 * turn, 2 * turn + 2), raw=turn == 2)
        engine.destroy()


def kept(stage: int) -> list[str]:
    """Somebody has the former engine still: what it says when it is used. The new one trains, also once the former is
    destroyed in the middle of its window."""
    model, plain = make(), Plain()
    former = engine_for(model, stage)
    train(former, plain, range(2))
    engine = engine_for(model, stage)
    plain.new()
    train(engine, plain, range(2, 4))

    def use() -> None:
        former.backward(_loss(former, 9, world()[0]))
        former.step()

    said = [raised_by(use)]
    for each in (former, engine):
        each.zero_grad()
    train(engine, plain, range(4, 5))
    loss = _loss(engine, 5, world()[0])
    engine.backward(loss)
    former.destroy()
    engine.step()
    plain.step(5)
    train(engine, plain, range(6, 8))
    engine.destroy()
    return said


def taking_turns(stage: int) -> None:
    """The former engine has the parameters again once the new one is destroyed, and its own moments."""
    model, plain = make(), Plain()
    former, of_former = engine_for(model, stage), plain.loop
    train(former, plain, range(2))
    engine = engine_for(model, stage)
    plain.new()
    train(engine, plain, range(2, 4))
    engine.destroy()
    plain.loop = of_former
    of_former.refresh_all()
    train(former, plain, range(4, 6))
    former.destroy()

"""Scripts and ranks that do not behave, run on every rank."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from support import whole
from torch import nn

import longshore
from engine.failure_cases import OPTIONS, backward, check_trains_on, make_engine, raised_by
from engine.scenarios import HEADS, Backward, Oracle, Scenario, Window, drive, inputs, make_model


def collectives_of_the_users_own(stage: int, slow: int) -> list[float]:
    """A mean of losses between backward and step(), as people log it, while the thread of collectives is at work."""
    rank = dist.get_rank()
    engine = make_engine(stage)
    means = []
    for step in range(4):
        loss = engine(inputs(step, 0, rank, torch.float32), HEADS)
        if rank == slow:
            time.sleep(0.02)
        engine.backward(loss)
        if rank != slow:
            time.sleep(0.02)
        total = torch.tensor([float(rank + 1)])
        dist.all_reduce(total)
        means.append(float(total))
        engine.step()
    engine.optimizer.close()
    engine = make_engine(stage)
    check_trains_on(engine, stage, rank, range(2))
    engine.optimizer.close()
    return means


def two_engines(stage: int) -> list[list[float]]:
    """Two networks trained in turn, as in a GAN; their backwards come before either steps."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    models = [nn.Linear(40, 40) for _ in range(2)]
    config = longshore.Config(stage=stage, reduce_bucket_numel=100, optimizer={"type": "AdamW", **OPTIONS})
    engines = [longshore.initialize(model=model, config=config).engine for model in models]
    for _ in range(10):
        x = torch.randn(3, 40) + rank
        for engine in engines:
            engine.backward(engine(x).pow(2).sum())
        for engine in reversed(engines):
            engine.step()
    for engine in engines:
        engine.destroy()
    return [[float(parameter.detach().double().sum()) for parameter in model.parameters()] for model in models]


def parameters_in_another_order(stage: int) -> str:
    """Layers of one shape, listed in another order on rank 1, as a set would list them."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    parameters = list(model.parameters())
    if dist.get_rank() == 1:
        parameters = [*parameters[4:], *parameters[2:4], *parameters[:2]]
    config = longshore.Config(stage=stage, optimizer={"type": "AdamW", **OPTIONS})
    return raised_by(lambda: longshore.initialize(model=model, model_parameters=parameters, config=config))


def freeze_second(model: Any) -> None:
    model.second.requires_grad_(False)


def thawed(stage: int, dtype: torch.dtype, accumulation: int) -> list[str]:
    """Parameters are thawed between two windows of several backwards; names of weights that differ from plain torch."""
    rank = dist.get_rank()
    model = make_model(dtype)
    model.second.requires_grad_(False)
    config = longshore.Config(
        stage=stage,
        gradient_accumulation_steps=accumulation,
        reduce_bucket_numel=500,
        optimizer={"type": "AdamW", **OPTIONS},
    )
    parameters = list(model.parameters())
    engine = longshore.initialize(model=model, model_parameters=parameters, config=config).engine
    scenario = Scenario(prepare=freeze_second)
    oracle = Oracle(scenario, dtype, 2, stage, **OPTIONS)
    window = Window((Backward(),) * accumulation, step_each=True)
    for step in range(4):
        if step == 2:
            model.second.requires_grad_(True)
            oracle.model.second.requires_grad_(True)
        drive(engine, window, step, rank, dtype)
        oracle.loop.step(oracle.gradients(window, step, accumulation))
    engine.optimizer.close()
    pairs = zip(model.named_parameters(), oracle.model.parameters(), strict=True)
    return [name for (name, ours), theirs in pairs if not torch.equal(whole(ours), theirs)]


class Synchronized(torch.autograd.Function):
    """Waits in backward for the other ranks, as SyncBatchNorm does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(torch.zeros(1))
        return gradients[0]


def collective_in_backward(idle: int) -> float:
    """A head is idle on one rank, and the ranks wait for each other in the middle of backward."""
    torch.manual_seed(0)
    trunk = nn.ModuleList([nn.Linear(30, 30) for _ in range(4)])
    heads = nn.ModuleList([nn.Linear(30, 30) for _ in range(2)])
    config = longshore.Config(stage=2, reduce_bucket_numel=900, optimizer={"type": "AdamW", **OPTIONS})
    engine = longshore.initialize(model=nn.ModuleList([trunk, heads]), config=config).engine
    start = time.monotonic()
    for _ in range(2):
        x = torch.randn(2, 30)
        for place, layer in enumerate(trunk):
            x = Synchronized.apply(layer(x)) if place == 0 else layer(x)
        used = heads if dist.get_rank() != idle else heads[:1]
        engine.backward(torch.stack([head(x).sum() for head in used]).sum())
        engine.step()
    engine.optimizer.close()
    return time.monotonic() - start


def unseen_write_in_one_shard() -> list[str]:
    """Both ranks write, undetected, one element that rank 0 steps: both are told, and neither has stepped."""
    os.environ["LONGSHORE_DEBUG"] = "1"
    try:
        rank = dist.get_rank()
        engine = make_engine(2, longshore.SimulatedTransfer(), detect_writes=False)
        drive(engine, Window(), 0, rank, torch.float32)
        weight = engine.module.first.weight
        with torch.no_grad():
            weight.data.view(-1)[0] += 1.0
        before = [whole(parameter.detach()).clone() for parameter in engine.module.parameters()]
        backward(engine, 1, rank)
        said = [raised_by(engine.step)]
        for parameter, old in zip(engine.module.parameters(), before, strict=True):
            assert torch.equal(whole(parameter), old)
        engine.optimizer.refresh_master()
        said.append(raised_by(engine.step))
        engine.optimizer.close()
        return said
    finally:
        os.environ["LONGSHORE_DEBUG"] = "0"


def expanded_buffer() -> list[float]:
    """A mask that repeats itself in memory, with other values on rank 1."""
    model = make_model(torch.float32)
    model.register_buffer("mask", torch.full((1, 5), float(dist.get_rank() + 1)).expand(4, 5))
    config = longshore.Config(stage=1, optimizer={"type": "AdamW", **OPTIONS})
    longshore.initialize(model=model, config=config).engine.optimizer.close()
    return [float(model.mask.sum())]


def unsynchronized(stage: int) -> int:
    """Three backwards inside no_sync(); returns how many sums, each as large as the model, are kept for them."""
    rank = dist.get_rank()
    engine = make_engine(stage)
    with engine.no_sync():
        for step in range(3):
            backward(engine, step, rank)
    kept = len(engine.optimizer._core.members.store._gradients._deferred)
    engine.zero_grad()
    oracle = Oracle(Scenario(), torch.float32, 2, stage, **OPTIONS)
    window = Window((Backward(unsynchronized=True),) * 3 + (Backward(),))
    for step in range(2):
        drive(engine, window, step, rank, torch.float32)
        oracle.loop.step(oracle.gradients(window, step, 1))
    for ours, theirs in zip(engine.module.parameters(), oracle.model.parameters(), strict=True):
        assert torch.equal(whole(ours), theirs)
    engine.optimizer.close()
    return kept

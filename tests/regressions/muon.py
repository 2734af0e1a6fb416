"""Muon and AdamW in one engine, several backwards a step, beside the plain loop."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from engine.muon_cases import equal, plain_of, started
from plain_muon import build
from torch import Tensor, nn


def loss_of(model: Any, number: int) -> Tensor:
    tokens = torch.randint(0, 11, (5, 7), generator=torch.Generator().manual_seed(number))
    return model(tokens).float().square().sum()


def train(stage: int, backwards: int = 1, clipping: float = 0.0, offload: str = "cpu", steps: int = 3) -> list[str]:
    """The names of the parameters that ever differ, and ``unclipped`` if a step was to be clipped, and was not."""
    plain_model = build()
    plain = plain_of(plain_model)
    zero = {"stage": stage, "offload_optimizer": {"device": offload}, "reduce_bucket_size": 3000}
    more = {"zero_optimization": zero, "gradient_accumulation_steps": backwards}
    engine = started(stage, torch.float32, gradient_clipping=clipping, **more)
    differing: list[str] = []
    for step in range(steps):
        for backward in range(backwards):
            engine.backward(loss_of(engine, number(step, backward, dist.get_rank())))
            engine.step()
        scale = 1.0
        if clipping:
            norm = torch.as_tensor(engine.get_global_grad_norm(), dtype=torch.float32)
            scale = float(torch.clamp(clipping / (norm + 1e-6), max=1.0))
            differing += ["unclipped"] if scale == 1.0 else []
        plain.step(gradients_of(plain_model, stage, step, backwards), scale)
        differing += equal(engine, plain_model)
    engine.destroy()
    return differing


def gradients_of(model: nn.Module, stage: int, step: int, backwards: int) -> dict[nn.Parameter, Tensor | None]:
    """Of one step, added in float32 in the order of the stage: below 2 each rank adds up its own backwards first."""
    size, parameters = dist.get_world_size(), list(model.parameters())

    def computed(backward: int, rank: int) -> list[Tensor]:
        loss = loss_of(model, number(step, backward, rank)) / backwards
        return list(torch.autograd.grad(loss, parameters))

    def added(parts: Iterable[list[Tensor]]) -> list[Tensor]:
        return [functools.reduce(torch.add, each) for each in zip(*parts, strict=True)]

    def mean(parts: Iterable[list[Tensor]]) -> list[Tensor]:
        return [each * (1.0 / size) for each in added(parts)]

    if stage < 2:
        sums = mean(added(computed(backward, rank) for backward in range(backwards)) for rank in range(size))
    else:
        sums = added(mean(computed(backward, rank) for rank in range(size)) for backward in range(backwards))
    return dict(zip(parameters, sums, strict=True))


def number(step: int, backward: int, rank: int) -> int:
    return 100 * step + 10 * backward + rank

"""Losses that are differentiated with ``create_graph=True``, run on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from support import PlainLoop, whole
from torch import Tensor, nn

from engine.failure_cases import OPTIONS, make_engine
from engine.scenarios import HEADS, _mean, _sum, inputs, make_model

Back = Callable[[Tensor], Any]
"""How the last loss of a window is differentiated."""


def loss_of(model: Any, step: int, rank: int, x: Tensor | None = None) -> Tensor:
    return model(inputs(step, 0, rank, torch.float32) if x is None else x, HEADS)


def once(model: Any, step: int, rank: int, last: Back) -> None:
    loss_of(model, step, rank).backward(create_graph=True)


def twice(model: Any, step: int, rank: int, last: Back) -> None:
    loss_of(model, step, rank).backward(create_graph=True)
    last(loss_of(model, step + 100, rank))


def penalty_on_inputs(model: Any, step: int, rank: int, last: Back) -> None:
    x = inputs(step, 0, rank, torch.float32).requires_grad_()
    loss_of(model, step, rank, x).backward(create_graph=True)
    assert x.grad is not None
    last(x.grad.pow(2).sum())


def penalty_on_gradients(model: Any, step: int, rank: int, last: Back) -> None:
    """By torch.autograd.grad, which leaves ``.grad`` alone."""
    loss = loss_of(model, step, rank)
    parameters = [parameter for parameter in model.parameters() if parameter.numel()]
    found = torch.autograd.grad(loss, parameters, create_graph=True)
    last(loss + 1e-3 * torch.stack([gradient.pow(2).sum() for gradient in found]).sum())


LOOPS = {loop.__name__: loop for loop in (once, twice, penalty_on_inputs, penalty_on_gradients)}


def gradients_of(twin: nn.Module, loop: Callable[..., None], step: int, rank: int) -> list[list[Tensor | None]]:
    """What each backward of the window brings in plain torch."""
    backwards: list[list[Tensor | None]] = []

    def taken() -> None:
        grads = [parameter.grad for parameter in twin.parameters()]
        backwards.append([None if grad is None else grad.detach().clone() for grad in grads])
        for parameter in twin.parameters():
            parameter.grad = None

    def last(loss: Tensor) -> None:
        if any(parameter.grad is not None for parameter in twin.parameters()):
            taken()
        loss.backward()

    loop(twin, step, rank, last)
    taken()
    return backwards


def trains(stage: int, name: str, by_engine: bool, clip: float | None) -> None:
    """The engine's weights are the plain loop's; ``by_engine``: engine.backward() differentiates the last loss."""
    import torch.distributed as dist

    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    engine = make_engine(stage, gradient_clipping=clip)
    twin, loop = make_model(torch.float32), LOOPS[name]
    plain = PlainLoop(twin.parameters(), **OPTIONS)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph")
            for step in range(3):
                loop(engine.module, step, rank, engine.backward if by_engine else Tensor.backward)
                engine.step()
                brought = [gradients_of(twin, loop, step, each) for each in range(world_size)]
                plain.step(total(brought, stage), coefficient_of(engine, clip))
                for (fqn, ours), theirs in zip(engine.module.named_parameters(), twin.parameters(), strict=True):
                    assert torch.equal(whole(ours), theirs), f"step {step}: {fqn} differs"
    finally:
        engine.destroy()


def coefficient_of(engine: Any, clip: float | None) -> float:
    if clip is None:
        return 1.0
    coefficient = float(torch.clamp(clip / (torch.tensor(engine.get_global_grad_norm()) + 1e-6), max=1.0))
    assert coefficient < 1.0
    return coefficient


def total(brought: list[list[list[Tensor | None]]], stage: int) -> list[Tensor | None]:
    """By rank, backward and parameter -> by parameter, as the stage adds them."""
    by_parameter = [list(zip(*entries, strict=True)) for entries in brought]
    ranks, places = range(len(brought)), range(len(by_parameter[0]))
    if stage >= 2:
        micros = range(len(brought[0]))
        return [_sum([_mean([brought[r][m][place] for r in ranks]) for m in micros]) for place in places]
    return [_mean([_sum(by_parameter[r][place]) for r in ranks]) for place in places]

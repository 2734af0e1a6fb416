"""Calls that one of two ranks makes and the other does not, run on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from engine.failure_cases import backward, check_trains_on, make_engine, raised_by


def called_on_one_rank(stage: int, what: str, before: str) -> str:
    """Rank 1 does something alone after a backward; what ``step()`` says of that. Then both go on.

    ``before``: what both ranks do after the backward: ``"norm"`` reduces what they kept.
    """
    rank = dist.get_rank()
    engine = make_engine(stage, gradient_accumulation_steps=2 if what == "raw backward" else 1)
    if what != "raw backward":
        backward(engine, 0, rank)
    if before == "norm":
        engine.optimizer.grad_norm()
    said = raised_by(lambda: _alone(engine, what, rank)) or raised_by(engine.step)
    engine.zero_grad()
    if what == "raw backward":
        engine.set_gradient_accumulation_steps(1)
    if said:
        check_trains_on(engine, stage, rank, range(3))
    engine.optimizer.close()
    return said


def _alone(engine: Any, what: str, rank: int) -> None:
    if what == "raw backward":
        for number in (0, 1):
            backward(engine, number, rank)
        if rank == 1:
            sum(parameter.sum() for parameter in engine.module.parameters()).backward()  # pyright: ignore
        return
    calls: dict[str, Callable[[], Any]] = {
        "norm": engine.optimizer.grad_norm,
        "zero_grad": engine.zero_grad,
    }
    if rank == 1:
        calls[what]()

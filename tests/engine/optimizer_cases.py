"""Optimizers by name and clients' own, on two ranks; run on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from support import PlainLoop
from torch import Tensor

from engine.files import assert_same, file, started, without
from engine.scenarios import Oracle, Scenario, Window, drive, make_model


def compare(stage: int, kind: type[torch.optim.Optimizer], options: dict[str, Any], **arguments: Any) -> None:
    """Three steps; raises where a weight differs from the plain loop's."""
    import torch.distributed as dist

    rank = dist.get_rank()
    oracle = Oracle(Scenario(), torch.float32, 2, stage)
    oracle.loop = PlainLoop(oracle.model.parameters(), kind, **options)
    with started(**arguments) as engine:
        for step in range(3):
            drive(engine, Window(), step, rank, torch.float32)
            gradients: list[Tensor | None] = oracle.gradients(Window(), step, 1)
            oracle.loop.step(gradients)
            assert_same(engine.module, oracle.model, f"{kind.__name__}, step {step}")


def _zero(stage: int) -> dict[str, Any]:
    return {"stage": stage, "reduce_bucket_size": 1100}


def by_name(stage: int, cases: list[tuple[str, dict[str, Any], type, dict[str, Any]]]) -> None:
    for kind, params, twin, options in cases:
        config = file(optimizer={"type": kind, "params": params}, zero_optimization=_zero(stage))
        compare(stage, twin, options, config=config, model=make_model(torch.float32))


def clients(stage: int) -> None:
    config = without(file(zero_optimization=_zero(stage)), "optimizer")
    model = make_model(torch.float32)
    given = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    compare(stage, torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}, config=config, model=model, optimizer=given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it has no kernel
        options = {"lr": 1e-3, "momentum": 0.9, "centered": True}
        compare(
            stage,
            torch.optim.RMSprop,
            options,
            config=config,
            model=make_model(torch.float32),
            optimizer=lambda parameters: torch.optim.RMSprop(parameters, **options),
        )

"""Optimizers by name and clients' own, on two ranks; run on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from support import PlainLoop, whole
from torch import Tensor

from engine.files import assert_same, file, started, without
from engine.scenarios import Oracle, Scenario, Window, drive, make_model


def compare(stage: int, kind: type[torch.optim.Optimizer], options: dict[str, Any], **arguments: Any) -> None:
    """Three steps; raises where a weight differs from the plain loop's."""
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


def what_a_script_keeps_of_its_optimizer(stage: int) -> None:
    """Its groups, and a schedule of it that the script steps itself: the weights of rates that are set directly."""
    found = []
    for scheduled in (False, True):
        model = make_model(torch.float32)
        client = torch.optim.SGD(model.parameters(), lr=1e-3, weight_decay=0.3)
        group = client.param_groups[0]
        schedule = torch.optim.lr_scheduler.LambdaLR(client, lambda step: 0.5**step) if scheduled else None
        config = without(file(zero_optimization=_zero(stage)), "optimizer")
        with started(config=config, model=model, optimizer=client) as engine:
            assert client.param_groups[0] is group is engine.optimizer.param_groups[0]
            group["weight_decay"] = 0.1
            for step in range(3):
                if schedule is None:
                    engine.optimizer.param_groups[0]["lr"] = 1e-3 * 0.5**step
                drive(engine, Window(), step, dist.get_rank(), torch.float32)
                if schedule is not None:
                    schedule.step()
            found.append([whole(each).detach().clone() for each in model.parameters()])
    first = make_model(torch.float32).parameters()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, found[0], strict=True))

"""What an engine says after ``destroy()``, run on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support import whole

from engine.failure_cases import backward, make_engine, raised_by
from engine.scenarios import HEADS, inputs
from longshore import utils


def after_destroy(stage: int) -> dict[str, str]:
    """What each call raises, by name; ``""``: nothing. The window is half full when the engine is destroyed."""
    import torch.distributed as dist

    rank = dist.get_rank()
    engine = make_engine(stage)
    optimizer, model = engine.optimizer, engine.module
    parameter = model.second.weight
    backward(engine, 0, rank)
    engine.step()
    saved = optimizer.state_dict()
    backward(engine, 1, rank)
    engine.destroy()
    engine.destroy()
    assert {entry.step for entry in engine.explain(False).parameters if entry.numel} == {1}

    # The parameters are ordinary ones.
    weights = [whole(each.detach()).clone() for each in model.parameters()]
    engine(inputs(2, 0, rank, torch.float32), HEADS).backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters() if each.numel())

    value = torch.zeros(parameter.shape)
    calls: dict[str, Callable[[], Any]] = {
        "engine.step": engine.step,
        "engine.backward": lambda: backward(engine, 2, rank),
        "engine.zero_grad": engine.zero_grad,
        "step": optimizer.step,
        "zero_grad": optimizer.zero_grad,
        "state_dict": optimizer.state_dict,
        "load_state_dict": lambda: optimizer.load_state_dict(saved),
        "state": lambda: dict(optimizer.state[parameter]),
        "grad_norm": optimizer.grad_norm,
        "clip_grad_norm_": lambda: optimizer.clip_grad_norm_(1.0),
        "get param": lambda: utils.safe_get_full_fp32_param(parameter),
        "get state": lambda: utils.safe_get_full_optimizer_state(parameter, "exp_avg"),
        "get grad": lambda: utils.safe_get_full_grad(parameter),
        "set param": lambda: utils.safe_set_full_fp32_param(parameter, value),
        "set state": lambda: utils.safe_set_full_optimizer_state(parameter, value, "exp_avg"),
        "set grad": lambda: utils.safe_set_full_grad(parameter, value),
    }
    said = {name: raised_by(call) for name, call in calls.items()}
    for ours, old in zip(model.parameters(), weights, strict=True):
        assert torch.equal(whole(ours), old)
    return said


def anew(stage: int) -> None:
    """The model of a destroyed engine can be given to another."""
    import torch.distributed as dist

    import longshore

    engine = make_engine(stage)
    backward(engine, 0, dist.get_rank())
    engine.step()
    engine.destroy()
    config = longshore.Config(stage=stage, optimizer={"type": "AdamW", "lr": 1e-3})
    second = longshore.initialize(model=engine.module, config=config).engine
    backward(second, 1, dist.get_rank())
    second.step()
    assert utils.safe_get_full_fp32_param(second.module.second.weight) is not None
    second.destroy()

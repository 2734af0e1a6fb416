"""Ctrl-C around the commit of a step, run on every rank."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import torch
from support import whole

from engine.failure_cases import OPTIONS, backward, make_engine, raised_by
from engine.scenarios import Oracle, Scenario, Window, drive


def interrupt(before: bool, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call`` with a Ctrl-C at its start or end, the first time. In a job it reaches the main thread."""
    calls: list[None] = []

    def interrupted(*arguments: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if before and len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        result = call(*arguments, **kwargs)
        if not before and len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        return result

    return interrupted


def interrupted_step(stage: int, at: str, interrupted: list[int], clip: float | None, by_engine: bool) -> list[Any]:
    """Interrupt the second of four steps; return how many steps were taken by it, and what each rank was told."""
    import torch.distributed as dist

    rank = dist.get_rank()
    engine = make_engine(stage, gradient_clipping=clip)
    store, core = engine.optimizer._core.members.store, engine.optimizer._core
    oracle = Oracle(Scenario(), torch.float32, 2, stage, **OPTIONS)
    drive(engine, Window(), 0, rank, torch.float32)
    oracle.loop.step(oracle.gradients(Window(), 0, 1))
    applied = [whole(parameter.detach()).clone() for parameter in oracle.model.parameters()]
    oracle.loop.step(oracle.gradients(Window(), 1, 1))
    backward(engine, 1, rank)
    owner, name, before = {
        "agreement": (store.residence, "outside_of_the_model", True),
        "measure": (store, "sum_of_squares", True),
        "preparation": (core.members, "name_states", True),
        "meeting": (store, "_meet", True),
        "tiles": (store.tiles, "commit", True),
        "stepped tiles": (store.tiles, "commit", False),
        "publishing": (store.ownership, "publish", True),
        "published": (store.window, "end", True),
    }[at]
    former, untouched = signal.signal(signal.SIGINT, signal.default_int_handler), getattr(owner, name)
    said = ""
    try:
        if rank in interrupted:
            setattr(owner, name, interrupt(before, untouched))
        (engine if by_engine else engine.optimizer).step()
    except KeyboardInterrupt:
        said = "KeyboardInterrupt"
        if at == "agreement" or (at == "preparation" and not by_engine):
            engine.zero_grad()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        engine.zero_grad()
    finally:
        signal.signal(signal.SIGINT, former)
        setattr(owner, name, untouched)
    weights = [whole(parameter.detach()) for parameter in engine.module.parameters()]
    steps = 2
    if all(torch.equal(ours, old) for ours, old in zip(weights, applied, strict=True)):
        steps, oracle = 1, Oracle(Scenario(), torch.float32, 2, stage, **OPTIONS)
        oracle.loop.step(oracle.gradients(Window(), 0, 1))
    counted = engine.global_steps
    for step in range(2, 4):
        drive(engine, Window(), step, rank, torch.float32)
        oracle.loop.step(oracle.gradients(Window(), step, 1))
    for ours, theirs in zip(engine.module.parameters(), oracle.model.parameters(), strict=True):
        assert torch.equal(whole(ours), theirs), (at, said, steps)
    engine.destroy()
    return [steps, counted, said]


def hook_interrupted(stage: int, interrupted: list[int]) -> list[str]:
    """``KeyboardInterrupt`` raised after the tiles were stepped, on some ranks; a state that is loaded mends that."""
    import torch.distributed as dist

    rank = dist.get_rank()
    engine = make_engine(stage)
    drive(engine, Window(), 0, rank, torch.float32)
    weights = [parameter.detach().clone() for parameter in engine.module.parameters()]
    state = engine.optimizer.state_dict()
    backward(engine, 1, rank)
    tiles, commit = engine.optimizer._core.members.store.tiles, engine.optimizer._core.members.store.tiles.commit

    def failing(*arguments: Any) -> None:
        commit(*arguments)
        raise KeyboardInterrupt

    tiles.commit = failing if rank in interrupted else commit
    said = []
    try:
        said.append(raised_by(engine.step))
    except KeyboardInterrupt:
        said.append("KeyboardInterrupt")
    said.append(raised_by(engine.step))
    tiles.commit = commit
    with torch.no_grad():
        for parameter, values in zip(engine.module.parameters(), weights, strict=True):
            parameter.copy_(values)
    engine.optimizer.load_state_dict(state)
    oracle = Oracle(Scenario(), torch.float32, 2, stage, **OPTIONS)
    oracle.loop.step(oracle.gradients(Window(), 0, 1))
    drive(engine, Window(), 1, rank, torch.float32)
    oracle.loop.step(oracle.gradients(Window(), 1, 1))
    for ours, theirs in zip(engine.module.parameters(), oracle.model.parameters(), strict=True):
        assert torch.equal(whole(ours), theirs)
    engine.destroy()
    return said

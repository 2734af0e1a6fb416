"""Loss scales on two ranks, of which one overflows; run on every rank."""

from __future__ import annotations

from typing import Any

import torch
from support import PlainLoop

from engine.files import OPTIONS, assert_same, file, started
from engine.scenarios import HEADS, MultiTask, inputs, make_model
from longshore.engine.precision import LossScaleError

TOO_LARGE = 1e9


def loss_of(model: Any, step: int, rank: int) -> torch.Tensor:
    return model(inputs(step, 0, rank, torch.float16), HEADS)


def mean_gradients(twin: MultiTask, step: int, scale: float) -> list[torch.Tensor | None]:
    """Of both ranks, with the losses scaled."""
    parameters = list(twin.parameters())
    found = [
        torch.autograd.grad(loss_of(twin, step, rank).float() * scale, parameters, allow_unused=True)
        for rank in range(2)
    ]
    return [None if one is None else (one.float() + two.float()) * 0.5 for one, two in zip(*found, strict=True)]


def overflows(section: dict[str, Any], stage: int, course: str) -> dict[str, Any]:
    """A window for each letter; rank 1's gradients overflow in those with an ``o``. Then one more at the minimum.

    Raises where a weight is not that of the plain loop, which skips those windows.
    """
    import torch.distributed as dist

    rank = dist.get_rank()
    twin = make_model(torch.float16)
    loop = PlainLoop(twin.parameters(), **OPTIONS)
    config = file(fp16=section, zero_optimization={"stage": stage, "reduce_bucket_size": 1100})
    found: dict[str, Any] = {"scales": [], "applied": []}
    with started(config, make_model(torch.float32)) as engine:

        def window(step: int, bad: bool) -> None:
            engine.backward(loss_of(engine, step, rank) * (TOO_LARGE if bad and rank == 1 else 1.0))
            engine.step()

        for step, letter in enumerate(course):
            scale = engine.loss_scale
            window(step, letter == "o")
            if letter == ".":
                loop.step(mean_gradients(twin, step, scale), 1 / scale)
            assert_same(engine.module, twin, f"window {step}")
            found["scales"].append(engine.loss_scale)
            found["applied"].append(engine.was_step_applied())
        try:
            window(99, bad=True)
        except LossScaleError as error:
            found["at the minimum"] = str(error)
        assert not engine.was_step_applied()
        found["skipped"] = engine.skipped_steps
        # And it goes on.
        scale = engine.loss_scale
        window(100, bad=False)
        loop.step(mean_gradients(twin, 100, scale), 1 / scale)
        assert engine.was_step_applied()
        assert_same(engine.module, twin, "after the error")
    return found

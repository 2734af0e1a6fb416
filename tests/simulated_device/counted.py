"""What a step costs on a device, counted by the simulated accelerator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import longshore
from simulated_device import counts, native

WIDTH = 16


def model_of(parameters: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(parameters)])


def _counted(call: Any) -> dict[str, int]:
    torch.accelerator.synchronize()
    native().reset_counts()
    call()
    found = counts()
    torch.accelerator.synchronize()
    return found


@contextlib.contextmanager
def _late() -> Iterator[None]:
    """All kernels and copies are late, so that nothing is done by chance before the host looks."""
    native().set_delays(0, 300, 300)
    try:
        yield
    finally:
        native().set_delays(0, 0, 0)


def of_optimizer(parameters: int, released: bool, clip: bool) -> list[dict[str, int]]:
    """Counts of a backward, and of a step with clipping, once everything has its place."""
    model = model_of(parameters).to("sim")
    optimizer = longshore.AdamW(model.parameters(), release_gradients=released)
    x = torch.ones(4, WIDTH, device="sim")
    found = []
    for _ in range(3):
        loss = model(x).pow(2).mean()
        with _late():
            found = [
                _counted(loss.backward),
                _counted(lambda: (optimizer.clip_grad_norm_(1e-3) if clip else None, optimizer.step())),
            ]
        optimizer.zero_grad()
    return found


def of_engine(parameters: int, stage: int, clip: bool) -> list[dict[str, int]]:
    """The same of an engine, on every rank."""
    import torch.distributed as dist

    device = torch.device("sim", dist.get_rank())
    config = longshore.Config(
        stage=stage,
        offload_device="cpu",
        optimizer={"type": "AdamW"},
        gradient_clipping=1e-3 if clip else None,
    )
    model = model_of(parameters).to(device)
    engine = longshore.initialize(model=model, config=config).engine
    x = torch.ones(4, WIDTH, device=device)
    found = []
    for _ in range(3):
        loss = engine(x).pow(2).mean()
        with _late():
            found = [
                _counted(lambda: (engine.backward(loss), engine.optimizer._core.members.store.collectives.drain())),  # noqa: B023
                _counted(engine.step),
            ]
    engine.destroy()
    return found


def memory_of_clipping(numel: int) -> int:
    """Bytes of the device that clipping takes for a moment, with one parameter of so many elements."""
    parameter = nn.Parameter(torch.zeros(numel, device="sim", dtype=torch.bfloat16))
    optimizer = longshore.AdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    optimizer.clip_grad_norm_(1.0)
    return torch.accelerator.max_memory_allocated() - before

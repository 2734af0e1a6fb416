"""docs/optimizer.md: torch's schedulers on our optimizers, which are torch.optim.Optimizers, and in an engine."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

import longshore


def decreasing(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def main() -> None:
    model = nn.Linear(8, 8)
    optimizer = longshore.AdamW(model.parameters(), lr=1e-3)
    plain: Optimizer = optimizer
    scheduler = CosineAnnealingLR(plain, T_max=10)
    for _ in range(3):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert scheduler.get_last_lr()[0] < 1e-3
    optimizer.close()

    engine, _, _, made = longshore.initialize(
        model=model,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        lr_scheduler=decreasing,
        config=longshore.Config(micro_batch_size=2, stage=0),
    )
    engine.backward(engine(torch.randn(2, 8)).sum())
    engine.step()
    assert made is engine.lr_scheduler and engine.was_step_applied()
    engine.destroy()


if __name__ == "__main__":
    main()

"""A trunk and heads that take turns: several backwards a step, learning rates of their own, clipping.

    python examples/multi_task.py --check
    torchrun --nproc-per-node=2 examples/multi_task.py --check

``--check`` repeats every step in plain PyTorch, for all ranks at once, and compares the weights.
"""

from __future__ import annotations

import argparse
import copy
import sys

import torch
from torch import Tensor, nn

import longshore

CLASSES = {"sentiment": 16, "topic": 32, "language": 48}


class MultiTask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU())
        self.heads = nn.ModuleDict({task: nn.Linear(128, classes) for task, classes in CLASSES.items()})

    def forward(self, task: str, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.heads[task](self.trunk(x)), labels)


def groups(model: MultiTask) -> list[dict]:
    return [
        {"params": list(model.trunk.parameters()), "lr": 3e-3},
        {"params": list(model.heads.parameters()), "lr": 1e-2, "weight_decay": 0.0},
    ]


def tasks_of(step: int) -> list[str]:
    """One to three tasks, each a backward of its own; the other heads are idle and stay as they are."""
    return list(CLASSES)[step % 3 :]


def batch(step: int, task: str, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    classes = CLASSES[task]
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * step + 100 * rank + classes))
    return x.to(device), x[:, :classes].argmax(dim=1).to(device)


class Plain:
    """The same training in plain PyTorch: torch's CPU AdamW on float32 masters, which are copied back."""

    def __init__(self, engine: longshore.Engine) -> None:
        self.engine, self.model = engine, copy.deepcopy(engine.module)
        entries = groups(self.model)
        self.parameters = [parameter for group in entries for parameter in group["params"]]
        for group in entries:
            group["params"] = [parameter.detach().cpu().clone() for parameter in group["params"]]
        self.masters = [master for group in entries for master in group["params"]]
        self.optimizer = torch.optim.AdamW(entries, fused=True)

    def step(self, step: int) -> None:
        world_size, device = self.engine.world_size, self.engine.device
        for task in tasks_of(step):
            losses = [self.model(task, *batch(step, task, rank, device)) for rank in range(world_size)]
            found = [torch.autograd.grad(loss, self.parameters, allow_unused=True) for loss in losses]
            for master, first, *others in zip(self.masters, *found, strict=True):
                if first is not None:
                    mean = sum(others, first).cpu() * (1 / world_size)
                    master.grad = mean if master.grad is None else master.grad + mean
        coefficient = torch.clamp(1.0 / (torch.tensor(self.engine.get_global_grad_norm()) + 1e-6), max=1.0)
        for master in self.masters:
            master.grad = None if master.grad is None else master.grad * coefficient
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = MultiTask()
    config = longshore.Config(stage=2, offload_device="cpu", gradient_clipping=1.0, optimizer={"type": "AdamW"})
    engine, _, _, _ = longshore.initialize(model=model, model_parameters=groups(model), config=config)
    plain = Plain(engine) if options.check else None
    for step in range(options.steps):
        losses = {}
        for task in tasks_of(step):
            loss = engine(task, *batch(step, task, engine.global_rank, engine.device))
            engine.backward(loss)
            losses[task] = loss.item()
        engine.step()
        if plain:
            plain.step(step)
        if engine.global_rank == 0 and step % 5 == 0:
            print(f"step {step}:", ", ".join(f"{task} {loss:.3f}" for task, loss in losses.items()))
    engine.explain()
    engine.destroy()
    if plain:
        equal = all(map(torch.equal, model.parameters(), plain.model.parameters()))
        print(f"rank {engine.global_rank}: weights equal those of plain PyTorch, bit for bit: {equal}")
        sys.exit(not equal)


if __name__ == "__main__":
    main()

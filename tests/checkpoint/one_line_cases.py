"""Loops without an engine, on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import longshore


def make(kind: str = "plain", seed: int = 0, tile_numel: int = 40, release_gradients: bool = False) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 3), nn.GELU(), nn.Linear(3, 7)).to(torch.bfloat16)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    groups = [{"params": [*model[0].parameters()]}, {"params": [*model[2].parameters()], "lr": 0.02}]
    optimizer = longshore.AdamW(
        groups, lr=0.01, release_gradients=release_gradients, offload=longshore.Offload(tile_numel, threads=1)
    )
    return model, optimizer


def train(model: Any, optimizer: Any, steps: int) -> None:
    """The same batch on all ranks."""
    for step in range(steps):
        torch.manual_seed(step + 10)
        model(torch.randn(4, 5, dtype=torch.bfloat16)).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: Any, optimizer: Any) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = whole(parameter).detach().clone()
        for key, value in optimizer.state[parameter].items():
            found[f"{name} {key}"] = whole(value).clone()
    return found


def save(kind: str, folder: str) -> dict[str, Tensor]:
    model, optimizer = make(kind)
    train(model, optimizer, 3)
    longshore.save(folder, model, optimizer, state={"step": 3})
    dist.barrier()
    return state_of(model, optimizer)


def load(kind: str, folder: str) -> dict[str, Tensor]:
    model, optimizer = make(kind, seed=1, tile_numel=7)
    assert longshore.load(folder, model, optimizer) == {"step": 3}
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
    return state_of(model, optimizer)

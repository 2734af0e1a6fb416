"""Loops without an engine, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
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


class Stage(nn.Module):
    """A stage of a pipeline, whose layers have the names that they have in the whole model."""

    def __init__(self, layers: Sequence[int], seed: int = 0, bias: bool = True) -> None:
        super().__init__()
        for layer in layers:
            torch.manual_seed(seed + layer)
            self.add_module(f"layer{layer}", nn.Linear(4, 4, bias=bias).to(torch.bfloat16))
            self.register_buffer(f"seen{layer}", torch.tensor(float(layer + seed)))

    def make(self) -> tuple[Stage, Any]:
        return self, longshore.AdamW(self.parameters(), lr=0.01, offload=longshore.Offload(7, threads=1))


def step_stage(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 3 + 0.5
    optimizer.step()
    optimizer.zero_grad()


def layers_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name.startswith("layer")}


def save_stages(folder: str, async_save: bool) -> dict[str, Tensor]:
    model, optimizer = Stage([[0, 1], [2]][dist.get_rank()]).make()
    step_stage(model, optimizer)
    if dist.get_rank() == 1:
        optimizer.param_groups[0]["lr"] = 0.5
    longshore.save(folder, model, optimizer, state={"step": 1}, async_save=async_save)
    longshore.wait_for_checkpoint()
    dist.barrier()
    return state_of(model, optimizer)


def load_stages(folder: str, stages: Sequence[Sequence[int]]) -> tuple[dict[str, Tensor], list[Tensor], float]:
    model, optimizer = Stage(stages[dist.get_rank()], seed=50).make()
    assert longshore.load(folder, model, optimizer) == {"step": 1}
    return state_of(model, optimizer), [*model.buffers()], optimizer.param_groups[0]["lr"]


def refused_stage(folder: str, change: str) -> str:
    """Save equal names with another content on rank 1, and return the error."""
    other = dist.get_rank() == 1
    model, optimizer = Stage([0], seed=9 if other and change == "values" else 0).make()
    if other and change == "shape":
        model.layer0 = nn.Linear(4, 2).to(torch.bfloat16)
        optimizer = longshore.AdamW(model.parameters(), lr=0.01)
    if other and change == "kind":
        model = Stage([1])
        optimizer = longshore.Lion(model.parameters(), lr=0.01)
    step_stage(model, optimizer)
    if other and change == "master":
        optimizer.state[model.layer0.weight]["exp_avg"].mul_(1)
        state = optimizer.state_dict()
        state["state"][0]["exp_avg"][0, 0] += 1
        optimizer.load_state_dict(state)
    if other and change == "lr":
        optimizer.param_groups[0]["lr"] = 0.5
    try:
        longshore.save(folder, model, optimizer)
    except longshore.CheckpointError as error:
        return str(error)
    return "saved"


def save_same(folder: str) -> dict[str, Tensor]:
    model, optimizer = Stage([0, 1]).make()
    step_stage(model, optimizer)
    model.seen0.add_(dist.get_rank())  # a buffer may differ: the first rank's is written
    longshore.save(folder, model, optimizer)
    return {**state_of(model, optimizer), "seen0": model.seen0 - dist.get_rank()}


def own_folders(folder: str) -> None:
    """Stages with equal names, each in a folder of its own."""
    rank = dist.get_rank()
    model, optimizer = Stage([0], seed=rank * 10).make()
    step_stage(model, optimizer)
    before = state_of(model, optimizer)
    longshore.save(f"{folder}/stage{rank}", model, optimizer)
    model, optimizer = Stage([0], seed=5).make()
    longshore.load(f"{folder}/stage{rank}", model, optimizer)
    after = state_of(model, optimizer)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def averaged(folder: str) -> bool:
    """DDP: rank 0 saves alone."""
    model, optimizer = Stage([0]).make()
    model = nn.parallel.DistributedDataParallel(model.float())
    optimizer = longshore.AdamW(model.parameters(), lr=0.01)
    if dist.get_rank() == 0:
        longshore.save(folder, model.module, optimizer)
    return longshore.load(folder, model.module) == {} if dist.get_rank() == 0 else True


def sharded_stages(folder: str) -> None:
    """Each stage is sharded by FSDP2 over a mesh of its own."""
    rank = dist.get_rank()
    meshes = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "data"))["data"]
    model, _ = Stage([rank]).make()
    fully_shard(model, mesh=meshes)
    optimizer = longshore.AdamW(model.parameters(), lr=0.01)
    step_stage(model, optimizer)
    before = state_of(model, optimizer)
    longshore.save(folder, model, optimizer)
    dist.barrier()
    model, _ = Stage([rank], seed=3).make()
    fully_shard(model, mesh=meshes)
    optimizer = longshore.AdamW(model.parameters(), lr=0.01)
    longshore.load(folder, model, optimizer)
    after = state_of(model, optimizer)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def stages_saved_again(folder: str) -> None:
    """Two stages, each on two ranks, in folders of their own; the process groups of a save are gone before the next."""
    stage = dist.get_rank() // 2
    model, optimizer = Stage([stage]).make()
    for number in range(3):
        step_stage(model, optimizer)
        longshore.save(f"{folder}/{number}/{stage}", model, optimizer)
    before = state_of(model, optimizer)
    model, optimizer = Stage([stage], seed=3).make()
    longshore.load(f"{folder}/2/{stage}", model, optimizer)
    after = state_of(model, optimizer)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def rank_zero_alone(folder: str) -> str:
    model, optimizer = Stage([0]).make()
    if dist.get_rank() == 0:
        try:
            longshore.save(folder, model, optimizer)
        except longshore.RankError as error:
            return str(error)
    return ""

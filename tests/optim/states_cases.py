"""States that are not float32 on a model that the user put on FSDP2, run on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from plain_states import StatesLoop, mixed_model
from support import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import longshore


def inputs(step: int, rank: int) -> Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + rank))


def _sharded() -> Any:
    model: Any = mixed_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _make(model: nn.Module, states: str, release: bool) -> Any:
    offload = longshore.Offload(1000, threads=1, states=states)
    return longshore.AdamW(model.named_parameters(), lr=1e-2, release_gradients=release, offload=offload)


def shards_are_encoded_as_the_whole(states: str, release: bool) -> None:
    """72 rows of 64, and 64 of 72, over the ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, twin = _sharded(), mixed_model()
    optimizer = _make(model, states, release)
    loop = StatesLoop(twin.parameters(), twin.named_parameters(), "AdamW", states, lr=1e-2)
    for step in range(4):
        model(inputs(step, rank)).pow(2).sum().backward()
        found = [
            torch.autograd.grad(twin(inputs(step, each)).pow(2).sum(), loop.parameters) for each in range(world_size)
        ]
        optimizer.step()
        optimizer.zero_grad()
        loop.step([torch.stack(each).sum(0) / world_size for each in zip(*found, strict=True)])
        for index, ((name, ours), theirs) in enumerate(zip(model.named_parameters(), twin.parameters(), strict=True)):
            assert torch.equal(whole(ours.detach()), theirs), f"step {step}: {name} differs"
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(whole(optimizer.state[ours][key]), loop.state(index, key)), (name, key)
    optimizer.close()


def a_state_that_is_sharded_otherwise(states: str) -> None:
    """Along columns, where the places of a shard's elements are not consecutive."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = nn.Parameter(distribute_tensor(torch.zeros(128, 128), mesh, [Shard(1)]))
    message = rf"parameter weight is sharded in a way for which states='{states}'"
    with pytest.raises(ValueError, match=message):
        longshore.AdamW([("weight", weight)], offload=longshore.Offload(states=states))

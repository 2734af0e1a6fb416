"""The one-line optimizer on a model that the user put on FSDP2, run on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import PlainLoop, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import longshore
from longshore.errors import LongshoreError

OPTIONS: dict[str, Any] = {"lr": 2e-3, "weight_decay": 0.05}


def make_model(dtype: torch.dtype) -> nn.Module:
    """Rows that cannot be shared evenly, a single row, and a layer that only some steps use."""
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "first": nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5)),
            "second": nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 5)),
            "head": nn.Linear(5, 1),
        }
    ).to(dtype)


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = make_model(dtype)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        parts: Any = self.parts
        x = x + parts["first"](x)
        if both:
            x = x + parts["second"](x)
        return parts["head"](x).float().pow(2).sum()


def inputs(step: int, micro: int, rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(3, 5, generator=generator).to(dtype)


def make_sharded(dtype: torch.dtype, shape: tuple[int, ...]) -> Net:
    model = Net(dtype)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    parts: Any = model.parts
    for name in ("first", "second"):
        fully_shard(parts[name], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(
    dtype: torch.dtype, release: bool, clip: str, shape: tuple[int, ...], steps: int = 4, ahead: bool = False
) -> dict[str, Any]:
    """As torchtitan's loop does, with two backwards a step; every weight and state is the plain loop's.

    Returns the largest difference to it, relative to the largest weight, where ranks are more than two.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, twin = make_sharded(dtype, shape), Net(dtype)
    offload = longshore.Offload(16, threads=1, speculation_memory="100%" if ahead else 0)
    optimizer = longshore.AdamW(model.parameters(), release_gradients=release, offload=offload, **OPTIONS)
    loop = PlainLoop(twin.parameters(), **OPTIONS)
    largest = 0.0
    try:
        for step in range(steps):
            both = step != 2
            for micro in range(2):
                model(inputs(step, micro, rank, dtype), both).backward()
            gradients = _plain(twin, loop, step, both, world_size, dtype, narrow=not release)
            norm = torch.tensor(sum(float(each.double().pow(2).sum()) for each in gradients if each is not None) ** 0.5)
            coefficient = 1.0
            if clip == "ours":
                found = optimizer.clip_grad_norm_(0.5)
                assert abs(float(found) - float(norm)) <= 1e-6 * float(norm)
                coefficient = float(torch.clamp(0.5 / (found + 1e-6), max=1.0))
            elif clip == "torch":
                found = nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()  # pyright: ignore
                scale = torch.clamp(0.5 / (found + 1e-6), max=1.0)
                gradients = [None if each is None else (each.to(dtype) * scale).float() for each in gradients]
            optimizer.step()
            optimizer.zero_grad()
            loop.step(gradients, coefficient)
            for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
                if world_size == 2:
                    assert torch.equal(whole(ours.detach()), theirs), f"step {step}: {name} differs"
                largest = max(largest, float((whole(ours.detach()) - theirs.detach()).abs().max()))
        for index, parameter in enumerate(model.parameters()):
            moments = loop.moments(index)
            for key, expected in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
                state = optimizer.state[parameter][key]
                assert state.placements == parameter.placements  # pyright: ignore
                if world_size == 2:
                    assert torch.equal(whole(state), expected), (index, key)
        kept = optimizer.speculation.kept if optimizer.speculation is not None else 0
        return {"largest": largest, "kept": kept}
    finally:
        optimizer.close()


def _plain(
    twin: Net,
    loop: PlainLoop,
    step: int,
    both: bool,
    world_size: int,
    dtype: torch.dtype,
    begin: Mapping[int, Tensor] = MappingProxyType({}),
    narrow: bool = True,
) -> list[Tensor | None]:
    """What FSDP2 reduces: each backward's mean, in the parameters' dtype, added up there (``narrow``) or in float32."""
    totals: list[Tensor | None] = [begin.get(place) for place in range(len(loop.parameters))]
    for micro in range(2):
        found = [
            torch.autograd.grad(twin(inputs(step, micro, rank, dtype), both), loop.parameters, allow_unused=True)
            for rank in range(world_size)
        ]
        for place, entries in enumerate(zip(*found, strict=True)):
            present = [entry for entry in entries if entry is not None]
            if present:
                mean = torch.stack(present).sum(0) / world_size
                mean = mean if narrow else mean.float()
                held = totals[place]
                totals[place] = mean if held is None else held + mean
    return [None if total is None else total.float() for total in totals]


def converted() -> None:
    """Conversions while the host has gradients: to what the model is, and to another dtype and back."""
    rank, results = dist.get_rank(), []
    for convert in (False, True):
        model = make_sharded(torch.float32, (2,))
        with contextlib.closing(longshore.AdamW(model.parameters(), release_gradients=True, **OPTIONS)) as optimizer:
            for step in range(3):
                for micro in range(2):
                    model(inputs(step, micro, rank, torch.float32)).backward()
                    if convert:
                        model.float().to("cpu")
                optimizer.step()
            results.append([parameter.full_tensor() for parameter in model.parameters()])  # pyright: ignore
            model(inputs(3, 0, rank, torch.float32)).backward()
            model.to(torch.bfloat16)
            assert all(parameter.dtype is torch.bfloat16 for parameter in model.parameters())
            with pytest.raises(LongshoreError, match="converted to another dtype"):
                optimizer.step()
            optimizer.zero_grad()
            model.float()(inputs(3, 0, rank, torch.float32)).backward()
            optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def saved_and_loaded(by_torch: bool) -> None:
    """Half a training, and the other half from its state: the weights of a training in one go."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    rank = dist.get_rank()

    def run(model: Net, optimizer: Any, steps: range) -> None:
        for step in steps:
            model(inputs(step, 0, rank, torch.bfloat16)).backward()
            optimizer.step()
            optimizer.zero_grad()

    def made() -> tuple[Net, Any]:
        model = make_sharded(torch.bfloat16, (dist.get_world_size(),))
        return model, longshore.AdamW(model.parameters(), offload=longshore.Offload(16, threads=1), **OPTIONS)

    model, optimizer = made()
    run(model, optimizer, range(6))
    first, begun = made()
    run(first, begun, range(3))
    second, other = made()
    second.load_state_dict(first.state_dict())
    if by_torch:
        set_optimizer_state_dict(second, other, get_optimizer_state_dict(first, begun))
    else:
        other.load_state_dict(begun.state_dict())
    run(second, other, range(3, 6))
    for (name, one), two in zip(model.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(whole(one.detach()), whole(two.detach())), name
    for each in (optimizer, begun, other):
        each.close()


def whole_state_is_cut() -> None:
    """A state that is not sharded: each rank takes its part. One that is sharded otherwise is refused."""
    model = make_sharded(torch.float32, (dist.get_world_size(),))
    optimizer = longshore.AdamW(model.parameters(), offload=longshore.Offload(16, threads=1), **OPTIONS)
    parameter = next(model.parameters())
    value = torch.arange(float(parameter.numel())).view(parameter.shape)
    optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": value, "exp_avg_sq": value}
    assert torch.equal(whole(optimizer.state[parameter]["exp_avg"]), value)
    from torch.distributed.tensor import Replicate, distribute_tensor

    replicated = distribute_tensor(value, parameter.device_mesh, [Replicate()])  # pyright: ignore
    optimizer.state[parameter]["exp_avg"] = replicated
    with pytest.raises(ValueError, match=r"placed as \(Replicate\(\),\) on"):
        optimizer.state_dict()  # what was assigned is checked when it is used
    optimizer.close()


def discarded() -> None:
    """What is discarded, or replaced, does not count; and torch's clipping is told where the gradients are."""
    rank, dtype = dist.get_rank(), torch.float32
    model, twin = make_sharded(dtype, (2,)), Net(dtype)
    optimizer = longshore.AdamW(
        model.parameters(), release_gradients=True, offload=longshore.Offload(16, threads=1), **OPTIONS
    )
    loop = PlainLoop(twin.parameters(), **OPTIONS)
    parts: Any = model.parts
    weight = parts["first"][0].weight
    index = [id(each) for each in model.parameters()].index(id(weight))
    for step in range(3):
        model(inputs(step, 7, rank, dtype)).backward()
        with pytest.raises(LongshoreError, match="its gradient is on the host"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step == 0:
            model.zero_grad()
        elif step == 1:
            optimizer.zero_grad()
        else:
            for each in model.parameters():
                each.grad = None
            weight.grad = torch.ones_like(weight)  # added to by what comes
        for micro in range(2):
            model(inputs(step, micro, rank, dtype)).backward()
        gradients = _plain(twin, loop, step, True, 2, dtype)
        if step == 2:
            gradients = _plain(twin, loop, step, True, 2, dtype, {index: torch.ones(weight.shape)})
        optimizer.step()
        loop.step(gradients)
        for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(whole(ours.detach()), theirs), f"step {step}: {name} differs"
        assert all(each.grad is None for each in model.parameters())
    optimizer.close()


def other_rule(kind: str, release: bool) -> None:
    """An optimizer whose fused step torch does not have for shards: the weights are those of the whole model's."""
    model, twin = make_sharded(torch.float32, (2,)), Net(torch.float32)
    how = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer, whole_one = (
        getattr(longshore, kind)(each.parameters(), lr=2e-2, release_gradients=release, weight_decay=0.05, **how)
        for each in (model, twin)
    )
    try:
        for step in range(3):
            x = inputs(step, 0, 0, torch.float32)  # alike on both ranks, so that the mean is exact
            for each, stepped in ((model, optimizer), (twin, whole_one)):
                before = [whole(parameter.detach()).clone() for parameter in each.parameters()]
                each(x).backward()
                stepped.step()
                stepped.zero_grad()
                assert not any(map(torch.equal, before, (whole(one.detach()) for one in each.parameters())))
            for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
                assert torch.equal(whole(ours.detach()), theirs), f"step {step}: {name}"
    finally:
        optimizer.close()
        whole_one.close()

"""Setups of code blocks (see ``code_block_setups.py``) about models on FSDP2: these run on two ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from code_block_setups import Names, batches_of, setup
from support import whole
from torch import Tensor, nn

import longshore


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.gelu(self.up(x))


class Tower(nn.Module):
    """Blocks whose shards on two ranks have a multiple of 16 elements, where torch's kernel is one code."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _towers(offload: bool) -> tuple[Tower, Tower, Names]:
    """A model, its twin on FSDP2 (with its offload), and what a block needs to shard the model itself."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    torch.manual_seed(0)
    model = Tower()
    other = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    for each in (*other.layers, other):
        fully_shard(each, mesh=mesh, **options)
    loader = batches_of(16, dist.get_rank())
    return model, other, {"model": model, "mesh": mesh, "fully_shard": fully_shard, "loader": loader}


def _same_on_all_ranks(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    # full_tensor() is a collective: every rank has to ask for all of them.
    equal = [torch.equal(mine.full_tensor(), their.full_tensor()) for mine, their in pairs]  # pyright: ignore
    return all(equal)


@setup
def sharded(_: Path) -> Iterator[Names]:
    """Two ranks; afterwards FSDP2's own offload, with torch's fused AdamW, has to end with the same weights."""
    model, other, names = _towers(offload=True)
    yield names
    ours, theirs = names["optimizer"], torch.optim.AdamW(other.parameters(), lr=1e-3, fused=True)
    untrained = not any(ours.state[p] for p in model.parameters())  # the block only made the optimizer
    for batch in names["loader"]:
        for each, optimizer in ((other, theirs), (model, ours)) if untrained else ((other, theirs),):
            each(batch).square().mean().backward()
            nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert _same_on_all_ranks(model, other)


@setup
def accumulated(_: Path) -> Iterator[Names]:
    """The same with one step on several backwards, on a model that is sharded already."""
    model, other, names = _towers(offload=False)
    for each in (*model.layers, model):
        names["fully_shard"](each, mesh=names["mesh"])
    yield {**names, "optimizer": longshore.AdamW(model.parameters(), lr=1e-3)}
    theirs, batches = torch.optim.AdamW(other.parameters(), lr=1e-3, fused=True), names["loader"]
    assert not _same_on_all_ranks(model, other)
    for place, batch in enumerate(batches):
        other.set_requires_gradient_sync(place == len(batches) - 1)  # pyright: ignore
        other(batch).square().mean().backward()
    theirs.step()
    assert _same_on_all_ranks(model, other)


@setup
def saved_by_torch(folder: Path) -> Iterator[Names]:
    """A checkpoint in bf16 of torch's optimizer; afterwards an engine goes on from what the block made of it, with the
    weights of the loop that the block leaves behind."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, other, names = _towers(offload=False)
    third = copy.deepcopy(model).bfloat16()
    for each in (*model.bfloat16().layers, model):
        names["fully_shard"](each, mesh=names["mesh"])
    other.bfloat16()
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-3, fused=True)
    for batch in names["loader"]:
        other(batch.bfloat16()).square().mean().backward()
        theirs.step()
        theirs.zero_grad()
    weights, state = get_state_dict(other, theirs)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "theirs")  # pyright: ignore
    yield {"model": model, "folder": folder / "theirs"}
    assert _same_on_all_ranks(model, other)
    config = longshore.Config(micro_batch_size=4, stage=3, dtype="bf16")
    engine, ours, *_ = longshore.initialize(
        model=third, config=config, optimizer=lambda found: longshore.AdamW(found, lr=1.0)
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* was saved by longshore.save, and has no counters")
        engine.load_checkpoint("converted")
    assert _same_on_all_ranks(third, other)
    for one, two in zip(ours.state.values(), theirs.state.values(), strict=True):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(whole(one[key]).float(), whole(two[key]).float())
    engine.destroy()


@setup
def gathered(_: Path) -> Iterator[Names]:
    """A model at stage 3, on two ranks."""
    torch.manual_seed(0)
    model = Tower()
    config = longshore.Config(micro_batch_size=4, stage=3)
    made = longshore.initialize(model=model, config=config, optimizer=longshore.AdamW(model.parameters()))
    yield {"model": model, "engine": made.engine, "rank": dist.get_rank()}
    assert model.head.weight.full_tensor()[0].eq(0).all() and model.head.weight.full_tensor()[1].ne(0).any()


@setup
def tensor_parallel(_: Path) -> Iterator[Names]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = Tower()
    names: Names = {
        "model": model,
        "init_device_mesh": init_device_mesh,
        "fully_shard": fully_shard,
        "parallelize_module": parallelize_module,
        "plan": {"layers.0.up": ColwiseParallel(output_layouts=_replicated())},
        "config": {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        },
    }
    yield names
    made = names["engine"]
    made.backward(made(batches_of(16)[0]).square().mean())
    made.step()
    assert made.was_step_applied()


def _replicated() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()

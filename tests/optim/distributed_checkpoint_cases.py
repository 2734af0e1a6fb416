"""``torch.distributed.checkpoint`` between ``torch.optim`` and longshore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import whole
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import longshore

KINDS: dict[str, dict[str, Any]] = {"AdamW": {}, "Adam": {"weight_decay": 0.1}, "SGD": {"momentum": 0.9}, "Adagrad": {}}


def make(maker: Any, kind: str, dtype: torch.dtype = torch.float32, seed: int = 0, sharded: bool = False) -> Any:
    """A model, and its optimizer with two groups. torch's optimizer is the fused one, whose bits are ours."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).to(dtype)
    if sharded:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    groups = [{"params": [*model[0].parameters()]}, {"params": [*model[1].parameters()], "lr": 0.02}]
    fused = {"fused": True} if maker is torch.optim else {}
    return model, getattr(maker, kind)(groups, lr=0.01, **KINDS[kind], **fused)


def step(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 3 + 0.5
    optimizer.step()
    optimizer.zero_grad()


def read(model: nn.Module, optimizer: Any, options: dict[str, bool] | None) -> dict[str, Any]:
    if options is None:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    of_model, of_optimizer = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return {"model": of_model, "optimizer": of_optimizer}


def exchange(
    folder: Path, source: Any, target: Any, kind: str, options: dict[str, bool] | None, **how: Any
) -> list[tuple[Tensor, Tensor]]:
    """Save after two steps, load into another optimizer, and step both once more; return both's parameters."""
    dtype, sharded, partly = how.get("dtype", torch.float32), how.get("sharded", False), how.get("partly", False)
    model, optimizer = make(source, kind, dtype, 0, sharded)
    for _ in range(2):
        step(model, optimizer)
    dcp.save(read(model, optimizer, options), checkpoint_id=folder, no_dist=not sharded)
    other, its = make(target, kind, dtype, 5, sharded)
    if options is None:  # get_state_dict does this itself
        step(other, its)
    found = read(other, its, options)
    planner = DefaultLoadPlanner(allow_partial_load=partly)
    dcp.load(found, checkpoint_id=folder, planner=planner, no_dist=not sharded)
    if options is None:
        other.load_state_dict(found["model"])
        its.load_state_dict(found["optimizer"])
    else:
        set_state_dict(
            other,
            its,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
            options=StateDictOptions(**options),
        )
    assert [group["lr"] for group in its.param_groups] == [0.01, 0.02]
    if not how.get("steps", True):
        return states(model, optimizer, other, its)
    step(model, optimizer)
    step(other, its)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return [(whole(ours).detach().clone(), whole(theirs).detach().clone()) for ours, theirs in pairs]


def states(model: nn.Module, optimizer: Any, other: nn.Module, its: Any) -> list[tuple[Tensor, Tensor]]:
    return [
        (value.float(), its.state[theirs][key].float())
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True)
        for key, value in optimizer.state[ours].items()
        if isinstance(value, Tensor) and key != "master"
    ]


def sharded(folder: str, ours_saves: bool, options: dict[str, bool] | None) -> None:
    makers = (longshore, torch.optim) if ours_saves else (torch.optim, longshore)
    pairs = exchange(Path(folder), *makers, "AdamW", options, sharded=True)
    assert pairs and all(torch.equal(one, other) for one, other in pairs)
    dist.barrier()


def sharded_masters(folder: str) -> None:
    """bf16 weights, whose masters are in the checkpoint."""
    for options in ({}, {"flatten_optimizer_state_dict": True}):
        where = Path(folder, str(len(options)))
        pairs = exchange(where, longshore, longshore, "AdamW", options, sharded=True, dtype=torch.bfloat16)
        assert pairs and all(torch.equal(one, other) for one, other in pairs)
        dist.barrier()

"""Parameters that are ``DTensor``s, as FSDP2 and tensor parallelism make them: what of them this process has."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a ``DTensor``; where its module was never imported there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def held_part(tensor: Tensor) -> Tensor:
    """What this process has of a tensor: its shard of a ``DTensor``, all of any other; the same memory."""
    return tensor._local_tensor if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def like(parameter: Tensor, held: Tensor) -> Tensor:
    """A ``DTensor`` placed as ``parameter`` is, of which this process has ``held``, on whatever device."""
    kind: Any = type(parameter.detach())
    spec: Any = parameter._spec  # pyright: ignore[reportAttributeAccessIssue]
    return kind(held, spec, requires_grad=False)


def gradient_part(leaf: Tensor | None, gradient: Tensor) -> Tensor:
    """What this process has of a gradient, placed as ``leaf``, into which it was accumulated.

    With tensor parallelism autograd may leave it as a sum whose addends are on several ranks, or all of it on each.
    Then the ranks of the mesh have to call.
    """
    if leaf is not None and is_sharded(leaf) and is_sharded(gradient) and _placing(leaf) != _placing(gradient):
        gradient = gradient.redistribute(placements=leaf.placements)  # pyright: ignore[reportAttributeAccessIssue]
    held: Any = held_part(gradient)
    module = sys.modules.get("torch.distributed._functional_collectives")
    # A collective of tensor parallelism may be under way still.
    return held.wait() if module is not None and isinstance(held, module.AsyncCollectiveTensor) else held


def part_of(parameter: Tensor, value: Tensor) -> Tensor | None:
    """What of ``value``, a ``DTensor`` placed alike or a whole tensor of the same shape, belongs with what this process
    has of ``parameter``; None where it is placed otherwise."""
    mesh, placements = _placing(parameter)
    if not is_sharded(value):
        from torch.distributed.tensor import distribute_tensor

        # No rank sends anything: each has all of it.
        return held_part(distribute_tensor(value.to(mesh.device_type), mesh, placements, src_data_rank=None))
    return held_part(value) if _placing(value) == (mesh, placements) else None


def over_ranks(parameters: Mapping[int, Tensor], sums: Mapping[int, float]) -> float:
    """``sums`` over the shards of parameters, each of this process, added up over all ranks; all have to call.

    What several ranks have alike counts once.
    """
    by_placing: dict[Any, float] = {}
    for index, value in sums.items():
        parameter: Any = parameters[index]
        key = (parameter.device_mesh, tuple(placement.is_replicate() for placement in parameter.placements))
        by_placing[key] = by_placing.get(key, 0.0) + value
    total = 0.0
    if by_placing:
        from torch.distributed.tensor import DTensor, Partial, Replicate

        for (mesh, replicated), value in by_placing.items():
            placements = [Replicate() if alike else Partial() for alike in replicated]
            mine = torch.tensor(value, dtype=torch.float64, device=mesh.device_type)
            total += DTensor.from_local(mine, mesh, placements, run_check=False).full_tensor().item()
    return total


def _placing(tensor: Any) -> tuple[Any, Any]:
    return tensor.device_mesh, tensor.placements

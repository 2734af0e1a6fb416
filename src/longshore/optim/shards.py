"""Parameters that are ``DTensor``s, as FSDP2 and tensor parallelism make them: what of them this process has."""

from __future__ import annotations

import sys
from typing import Any

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


def _placing(tensor: Any) -> tuple[Any, Any]:
    return tensor.device_mesh, tensor.placements

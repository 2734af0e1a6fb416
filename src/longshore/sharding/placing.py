"""How FSDP2, and tensor parallelism before it, placed the parameters of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate, Shard

from longshore.sharding.rank_grid import Cut, RankGrid


class Placing:
    """Which rank has what of each parameter.

    Args:
        members: what FSDP2 knows of each parameter, by name.

    Raises:
        ValueError: a parameter that is placed otherwise than the others, or in a way that cannot be honoured, by name.
    """

    def __init__(self, members: Mapping[str, Any]) -> None:
        # Of FSDP2: the last dimension shards, the others replicate. What tensor parallelism left alone is on this mesh,
        # of the ranks that have the same part of the others.
        self._data_mesh = next(iter(members.values())).mesh_info.mesh
        parallel = (each._spmd_mesh for each in members.values() if each._unsharded_dtensor_spec is not None)
        whole = next(parallel, self._data_mesh)
        for name, member in members.items():
            _check_placements(name, member)
            expected = whole if _parallel_placements(member) else self._data_mesh
            mesh = member._spmd_mesh
            if not torch.equal(mesh.mesh, expected.mesh) or whole.size() != dist.get_world_size():
                raise ValueError(f"parameter {name} is on {mesh}; all parameters have to be on one mesh of all ranks")
        shape = (-1, self._data_mesh.size(-1), whole.size() // self._data_mesh.size())
        self.grid = RankGrid.of(whole.mesh.reshape(shape).tolist())
        self.part = self.grid.places[dist.get_rank()].part
        """Of tensor parallelism, of this rank."""
        self._parallel = {id(each.sharded_param) for each in members.values() if _parallel_placements(each)}
        self._cuts = {id(each.sharded_param): self._cut(each) for each in members.values()}

    def _cut(self, member: Any) -> Cut:
        dim = next((placement.dim for placement in _parallel_placements(member) if placement.is_shard()), None)
        return Cut(tuple(member.sharded_param.shape), dim, self.grid.parts, self.grid.shards)

    def cut_of(self, parameter: Tensor) -> Cut:
        return self._cuts[id(parameter)]

    def is_parallel(self, parameter: Tensor) -> bool:
        """Whether tensor parallelism made it a DTensor, before FSDP2 did."""
        return id(parameter) in self._parallel

    def shard_of(self, parameter: Tensor, rank: int) -> tuple[int, int]:
        """``(offset, numel)`` of what a rank has, in its part of the parameter, flat."""
        return self.cut_of(parameter).shard(self.grid.places[rank])

    def joined(self, parameter: Tensor, by_rank: Sequence[Tensor]) -> Tensor:
        """All of a parameter, flat, from what each rank has of it."""
        places = self.grid.places
        parts: list[list[Tensor]] = [[] for _ in range(self.grid.parts)]
        for rank in sorted(range(len(places)), key=lambda rank: places[rank].shard):
            if places[rank].replica == 0:
                parts[places[rank].part].append(by_rank[rank])
        return self.cut_of(parameter).joined([torch.cat(shards) for shards in parts])

    @property
    def shard_group(self) -> Any:
        """The ranks that have the shards of one replica, and the same part as this one, which is among them."""
        return self._data_mesh.get_group(self._data_mesh.ndim - 1)


def tensor_parallel_size(model: nn.Module) -> int:
    """Over how many ranks tensor parallelism goes in a model that ``fully_shard`` was applied to."""
    members = [
        member
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
        for member in group.fsdp_params
    ]
    specs = [member._unsharded_dtensor_spec for member in members]
    return max((spec.mesh.size() for spec in specs if spec is not None), default=1)


def _parallel_placements(member: Any) -> Sequence[Any]:
    """On the dimensions of tensor parallelism; empty for a parameter that it left alone."""
    spec = member._unsharded_dtensor_spec
    return () if spec is None else spec.placements


def _check_placements(name: str, member: Any) -> None:
    placements, parallel = member.sharded_param.placements, _parallel_placements(member)
    found = f"parameter {name} is placed as {placements} on {member._spmd_mesh}"
    # Others, as strided ones, are neither.
    taken = all(type(each) in (Shard, Replicate) for each in parallel)
    if len(parallel) > 1 or not taken or member.mesh_info.is_spmd_mesh:
        raise ValueError(
            f"{found}; beside fully_shard longshore takes tensor parallelism over one dimension of a mesh, applied "
            "before it, that shards or replicates each parameter (parallelize_module, and then fully_shard with the "
            "mesh of the other dimensions)"
        )
    *replicated, sharded = placements[: len(placements) - len(parallel)]
    # Strided where tensor parallelism cuts the first dimension too: then FSDP2 cuts what that left of it.
    by_rows = getattr(sharded, "dim", None) == 0
    if not by_rows or not all(placement.is_replicate() for placement in replicated):
        raise ValueError(
            f"{found}; longshore steps parameters that are sharded along their first dimension over the last dimension "
            "of a mesh (that of tensor parallelism left aside), and replicated over the others"
        )

"""FSDP2's records of a model: which groups of parameters it gathers together, and how each parameter is placed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate, Shard


def tensor_parallel_size(model: nn.Module) -> int:
    """Return the number of ranks of tensor parallelism in a model that ``fully_shard`` was applied to."""
    groups = [group for module in model.modules() if isinstance(module, FSDPModule) for group in groups_of(module)]
    specs = [member._unsharded_dtensor_spec for group in groups for member in group.fsdp_params]
    return max((spec.mesh.size() for spec in specs if spec is not None), default=1)


def groups_of(module: FSDPModule) -> Sequence[Any]:
    """Return FSDP2's records of the groups of parameters that it gathers together for a module."""
    return module._get_fsdp_state()._fsdp_param_groups


def modules_with(member: Any) -> list[nn.Module]:
    """Return the modules that have a parameter: several if it is tied."""
    return [member._module_info.module, *member._module_info.shared_modules]


def parallel_placements(member: Any) -> Sequence[Any]:
    """Return the placements on the dimensions of tensor parallelism; empty for a parameter outside of it."""
    spec = member._unsharded_dtensor_spec
    return () if spec is None else spec.placements


def check_supported(name: str, member: Any) -> None:
    """Raise ValueError if longshore does not step a parameter that is placed like this one."""
    placements, parallel = member.sharded_param.placements, parallel_placements(member)
    found = f"parameter {name} is placed as {placements} on {member._spmd_mesh}"
    # Other placements, such as strided shards, are of neither type.
    taken = all(type(each) in (Shard, Replicate) for each in parallel)
    if len(parallel) > 1 or not taken or member.mesh_info.is_spmd_mesh:
        raise ValueError(
            f"{found}; beside fully_shard longshore takes tensor parallelism over one dimension of a mesh, applied "
            "before it, that shards or replicates each parameter (parallelize_module, and then fully_shard with the "
            "mesh of the other dimensions)"
        )
    *replicated, sharded = placements[: len(placements) - len(parallel)]
    # The placement is strided if tensor parallelism divides the first dimension too: FSDP2 then divides each part.
    by_rows = getattr(sharded, "dim", None) == 0
    if not by_rows or not all(placement.is_replicate() for placement in replicated):
        raise ValueError(
            f"{found}; longshore steps parameters that are sharded along their first dimension over the last dimension "
            "of a mesh (that of tensor parallelism left aside), and replicated over the others"
        )

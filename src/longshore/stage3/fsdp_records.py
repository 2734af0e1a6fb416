"""FSDP2's records of a model: which groups of parameters it gathers together, and how each parameter is placed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate, Shard

from longshore.optim.shards import former_of

_TRAINABLE: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
"""Which parameters were trainable when :func:`align_trainable` saw them last, by FSDP2's record. It outlives engines,
since scripts freeze and thaw between two of them, too."""


def tensor_parallel_size(model: nn.Module) -> int:
    """Return the number of ranks of tensor parallelism in a model that ``fully_shard`` was applied to."""
    specs = [member._unsharded_dtensor_spec for member in members_of(model)]
    return max((spec.mesh.size() for spec in specs if spec is not None), default=1)


def groups_of(module: FSDPModule) -> Sequence[Any]:
    """Return FSDP2's records of the groups of parameters that it gathers together for a module."""
    return module._get_fsdp_state()._fsdp_param_groups


def members_of(model: nn.Module) -> list[Any]:
    """Return FSDP2's records of all parameters of a model."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return [member for module in modules for group in groups_of(module) for member in group.fsdp_params]


def check_not_gathered(model: nn.Module) -> None:
    """Raise ValueError if parameters of a model are gathered now: what trains, and the weights, would be theirs."""
    gathered = {id(getattr(member, "_unsharded_param", None)) for member in members_of(model)}
    for name, parameter in model.named_parameters():
        if id(parameter) in gathered:
            raise ValueError(
                f"parameter {name} is gathered, as a forward without a backward leaves it, and not a shard: call "
                "reshard() of the model (and of each module that stays gathered) before initialize()"
            )


def align_trainable(members: Iterable[Any]) -> None:
    """Freeze or thaw a shard, the tensor into which it is gathered, and the parameter that it replaced as the user did
    one of them.

    FSDP2 only ever carries this from shards to gathered tensors, when it gathers them. Users may hold any of them.
    """
    for member in members:
        shard = member.sharded_param
        leaf = getattr(member, "_unsharded_param", shard)
        former = former_of(shard)
        handles = (shard, leaf) if former is None else (shard, leaf, former)
        # Before any engine, the gathered tensor is as the shard was when FSDP2 gathered it last.
        before = _TRAINABLE.setdefault(member, leaf.requires_grad)
        if all(each.requires_grad == before for each in handles):
            continue
        _TRAINABLE[member] = not before
        for each in handles:
            each.requires_grad_(not before)


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

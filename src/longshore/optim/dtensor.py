"""Parameters as wrappers make them: ``DTensor``s (FSDP2, tensor parallelism), of which this process has a part, and
names with the parts that wrappers put into them."""

from __future__ import annotations

import gc
import math
import sys
import weakref
import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_CHUNK = 1 << 26
"""Elements that are copied from a device at a time."""

_SHARD_OF = WeakIdKeyDictionary()
"""For each parameter that a shard replaced, a weak reference to the shard."""
_FORMER_OF = WeakIdKeyDictionary()
"""For each of these shards, a weak reference to the parameter that it replaced."""


def replace_by_shards(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Note for each pair that a model had the first parameter, which scripts may keep, and has the second now."""
    for former, shard in pairs:
        _SHARD_OF[former], _FORMER_OF[shard] = weakref.ref(shard), weakref.ref(former)


def present(parameter: Tensor) -> Tensor:
    """Return the shard that replaced this parameter; the parameter itself if none did, or it is gone."""
    found = _SHARD_OF.get(parameter)
    shard = None if found is None else found()
    return parameter if shard is None else shard


def former_of(shard: Tensor) -> Tensor | None:
    """Return the parameter that a shard replaced, if a script still has it."""
    found = _FORMER_OF.get(shard)
    return None if found is None else found()


def is_former(parameter: Tensor) -> bool:
    """Return whether a shard replaced this parameter."""
    return parameter in _SHARD_OF


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a ``DTensor``; none is one before the module of ``DTensor`` is imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def held_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, in the same memory: its shard of a ``DTensor``, or the tensor."""
    # A DTensor that is whole for a while (see stage3/gathered.py) is of another type, and keeps its shard.
    return getattr(tensor, "_local_tensor", tensor)


def flat(tensor: Tensor) -> Tensor:
    """Return a tensor's elements in logical order, flat and contiguous: a view if possible.

    ``reshape`` alone keeps the stride of a one-dimensional tensor, and the memory of a tensor with the negative bit has
    other numbers than the tensor.
    """
    if tensor.is_contiguous() and not tensor.is_neg():
        return tensor.detach().view(-1)
    return tensor.detach().resolve_neg().reshape(-1).contiguous()


def checksum(tensor: Tensor) -> int:
    """Return a checksum (CRC-32) of a tensor's bytes."""
    found = 0
    for part in flat(tensor).split(_CHUNK):
        found = zlib.crc32(memoryview(part.cpu().view(torch.uint8).numpy()), found)  # pyright: ignore[reportArgumentType]
    return found


def first_element(parameter: Any) -> int | None:
    """Return the place in a ``DTensor``, flat, of the first element of this process's shard; None if it is not sharded
    along its first dimension alone, or the same on all ranks."""
    mesh, placements = _placing(parameter)
    along = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    if not along:
        return 0
    if len(along) > 1 or not placements[along[0]].is_shard(0):
        return None
    rows = parameter.shape[0]
    each = -(-rows // mesh.size(along[0]))  # as torch.chunk divides
    return min(each * mesh.get_local_rank(along[0]), rows) * math.prod(parameter.shape[1:])


def like(parameter: Tensor, held: Tensor) -> Tensor:
    """Return a ``DTensor`` placed like ``parameter``, with ``held``, on any device, as this process's shard."""
    kind: Any = type(parameter.detach())
    spec: Any = parameter._spec  # pyright: ignore[reportAttributeAccessIssue]
    return kind(held, spec, requires_grad=False)


def is_sum_over_ranks(tensor: Tensor) -> bool:
    """Return whether a tensor is a ``DTensor`` whose addends are on several ranks, not added up yet."""
    return is_sharded(tensor) and any(each.is_partial() for each in tensor.placements)  # pyright: ignore[reportAttributeAccessIssue]


def gradient_part(leaf: Tensor | None, gradient: Tensor) -> Tensor:
    """Return this process's part of a gradient, placed like ``leaf``, into which it was accumulated.

    With tensor parallelism autograd may leave the gradient as a sum whose addends are on several ranks, or whole on
    each rank. Then all ranks of the mesh have to call this function.
    """
    if leaf is not None and is_sharded(leaf) and is_sharded(gradient) and _placing(leaf) != _placing(gradient):
        gradient = gradient.redistribute(placements=leaf.placements)  # pyright: ignore[reportAttributeAccessIssue]
    held: Any = held_part(gradient)
    module = sys.modules.get("torch.distributed._functional_collectives")
    # A collective of tensor parallelism may still be under way.
    return held.wait() if module is not None and isinstance(held, module.AsyncCollectiveTensor) else held


def part_of(parameter: Tensor, value: Tensor) -> Tensor | None:
    """Return the part of ``value`` that corresponds to this process's part of ``parameter``; None if it is placed
    differently. ``value`` is a ``DTensor``, or a whole tensor of the same shape."""
    mesh, placements = _placing(parameter)
    if not is_sharded(value):
        from torch.distributed.tensor import distribute_tensor

        # No rank sends anything: each has the whole tensor.
        return held_part(distribute_tensor(value.to(mesh.device_type), mesh, placements, src_data_rank=None))
    return held_part(value) if _placing(value) == (mesh, placements) else None


def over_ranks(parameters: Mapping[int, Tensor], sums: Mapping[int, float]) -> float:
    """Return ``sums``, over this process's shards of parameters, added up over all ranks; all have to call this.

    Shards that several ranks have in common count once.
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


def check_not_wrapped(parameters: Collection[Tensor]) -> None:
    """Raise ValueError if another library reduces the gradients of a parameter after the hooks that would take them."""
    own = {id(parameter) for parameter in parameters}
    if any(getattr(parameter, "_is_flat_param", False) for parameter in parameters):
        raise ValueError(
            "release_gradients=True takes gradients before FullyShardedDataParallel has reduced them: use fully_shard "
            "(FSDP2), or release_gradients=False"
        )
    if any(id(parameter) in own for wrapper in data_parallel_wrappers() for parameter in wrapper.parameters()):
        raise ValueError(
            "release_gradients=True takes gradients before DistributedDataParallel has reduced them: use "
            "release_gradients=False, or longshore.initialize with the module inside it"
        )


def data_parallel_wrappers() -> list[Any]:
    """Return the wrappers of type ``DistributedDataParallel``."""
    ranks = sys.modules.get("torch.distributed")
    if ranks is None or not (ranks.is_available() and ranks.is_initialized()):
        return []
    # There is no way from a parameter to its wrapper. A module is looked for by its type alone: asking an object for
    # its class can run any code.
    ddp = torch.nn.parallel.DistributedDataParallel
    return [each for each in gc.get_objects() if issubclass(type(each), ddp)]


_COMPILED_AND_SHARDED = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Parts that are nobody else's: torch.compile's, activation checkpointing's and FSDP's."""
_DATA_PARALLEL = "module"
"""DistributedDataParallel's and DataParallel's part; users have modules of this name too."""


def unwrapped(name: str) -> str:
    """Return the name without the parts of wrappers; ``module`` stays, which may be the user's."""
    return _without(name, _COMPILED_AND_SHARDED)


def counterparts(names: Iterable[str], others: Collection[str]) -> dict[str, str]:
    """Return for each name the one of ``others`` that is the same but for the parts of wrappers, or else the name.

    Equal names come first. Names that would be two of ``others``, or that two would be, have no counterpart.
    """
    found = {name: name for name in names}
    rest = _by_bare_name(name for name in found if name not in others)
    theirs = _by_bare_name(other for other in others if other not in found)
    for bare, mine in rest.items():
        if len(mine) == 1 and len(theirs.get(bare, ())) == 1:
            found[mine[0]] = theirs[bare][0]
    return found


def _by_bare_name(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_without(name, _COMPILED_AND_SHARDED | {_DATA_PARALLEL}), []).append(name)
    return found


def _without(name: str, wrappers: Collection[str]) -> str:
    *modules, last = name.split(".")
    return ".".join([*(module for module in modules if module not in wrappers), last])

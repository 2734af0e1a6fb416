"""Ranks that have different parameters, such as the stages of a pipeline: each tensor is written by a rank that has it.

Ranks that have a tensor of the same name have to have the same values. A checksum compares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from longshore.checkpoint.files import checksum
from longshore.checkpoint.model_state import MODEL, ModelState
from longshore.checkpoint.optimizer_state import OPTIMIZER, OptimizerState
from longshore.errors import CheckpointError
from longshore.optim.shards import is_sharded

_SHOWN = 20

Held = Mapping[str, Any]
"""What has to be the same on all ranks that have a tensor, by what it is."""


def held_by(model: ModelState, optimizer: OptimizerState | None) -> dict[str, Held]:
    """Return this rank's part of each tensor, by the tensor's name."""
    found: dict[str, Held] = {}
    for name, tensor in model.tensors.items():
        about: dict[str, Any] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype), "device mesh": None}
        if is_sharded(tensor):
            about["device mesh"] = tensor.device_mesh.mesh.tolist()  # pyright: ignore[reportAttributeAccessIssue]
        elif isinstance(tensor, nn.Parameter):  # buffers may differ: one rank writes all of them
            about["values"] = checksum(tensor)
        found[name] = about
    if optimizer is not None:
        for name, about in optimizer.held().items():
            found[name] = {**found[name], **about}
    return found


def tensors_to_write(ranks: Sequence[Mapping[str, Held]], rank: int, buffers: set[str]) -> set[str]:
    """Return the names of the tensors, among those that are not sharded, that a rank writes.

    Raises:
        CheckpointError: ranks have tensors of the same name that differ; it is the same on all ranks.
    """
    holders: dict[str, list[int]] = {}
    for number, held in enumerate(ranks):
        for name in held:
            holders.setdefault(name, []).append(number)
    differing = {}
    for name, (first, *others) in holders.items():
        for other in others:
            one, two = ranks[first][name], ranks[other][name]
            if keys := [key for key in {**one, **two} if one.get(key) != two.get(key)]:
                differing[name] = f"  {name}: ranks {first} and {other} differ in {', '.join(keys)}"
                break
    if differing:
        lines = [*differing.values()][:_SHOWN]
        if len(differing) > _SHOWN:
            lines.append(f"  and {len(differing) - _SHOWN} more")
        raise CheckpointError(
            "ranks have different tensors of the same name, of which a checkpoint can have one. Stages of a pipeline: "
            "give their modules different names, such as those of the whole model, or save each stage into a folder of "
            "its own. Copies of one model: average their gradients (DistributedDataParallel). Differences: "
            f"{len(differing)}\n" + "\n".join(lines)
        )
    # Buffers from one rank: the mean of a rank's batches would not fit the variance of another's.
    return {
        name
        for place, (name, having) in enumerate(sorted(holders.items()))
        if having[0 if name in buffers else place % len(having)] == rank
    }


def merged(abouts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one description of the models and optimizers of all ranks.

    Raises:
        CheckpointError: the ranks have different kinds of optimizer; it is the same on all ranks.
    """
    models = [about[MODEL] for about in abouts]
    model: dict[str, Any] = {key: {} for key in ("aliases", "extra_state")}
    for each in reversed(models):  # the first rank's count
        for key, entries in model.items():
            entries.update(each[key])
    for key in ("left_out", "parameters"):
        model[key] = [*dict.fromkeys(name for each in models for name in each[key])]
    optimizers = [about[OPTIMIZER] for about in abouts if about[OPTIMIZER] is not None]
    if not optimizers:
        return {MODEL: model, OPTIMIZER: None}
    kinds = sorted({each["kind"] for each in optimizers})
    if len(kinds) > 1:
        raise CheckpointError(
            f"the ranks' optimizers are {' and '.join(kinds)}, and a checkpoint has one kind: save each rank's into a "
            "folder of its own"
        )
    groups, named = [], set()
    for group in (group for each in optimizers for group in each["groups"]):
        names = [name for name in group["parameters"] if name not in named]
        named.update(names)
        if names:
            groups.append({**group, "parameters": names})
    parameters = {name: entry for each in reversed(optimizers) for name, entry in each["parameters"].items()}
    return {MODEL: model, OPTIMIZER: {"kind": kinds[0], "groups": groups, "parameters": parameters}}

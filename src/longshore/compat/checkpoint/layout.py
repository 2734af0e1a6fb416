"""The layout of parameters' state in DeepSpeed's files.

DeepSpeed's optimizers step flat groups, in which the elements of several parameters follow each other, and which are
sharded over the ranks. At stages 1 and 2 the group as a whole is divided among the ranks; at stage 3 each parameter is
divided, and a rank's group has its shard of each parameter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longshore import CheckpointError
from longshore.compat.checkpoint.files import SavedFiles, Shard
from longshore.seam import Box, SavedBoxes, checked, checked_entry

_STATE = "optimizer_state_dict"
_FLAT, _FLAT_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
_BASE, _BASE_3 = "base_optimizer_state", "optimizer_state_dict"
_ALIGNMENT = 2
"""Flat groups are padded to a multiple of this number of elements times the number of ranks."""
_LARGEST = 1 << 62


class ShardedTensor(NamedTuple):
    """A tensor whose elements are in ``ranges``, flat tensors in the order of the elements."""

    shape: tuple[int, ...]
    ranges: Sequence[Tensor]

    def saved(self, name: str, dtype: torch.dtype) -> SavedBoxes:
        """Return the whole tensor as boxes to write under the name ``name``."""
        read = functools.partial(self._read, dtype)
        return SavedBoxes(name, dtype, self.shape, [Box.whole(self.shape)], read)

    def _read(self, dtype: torch.dtype) -> Tensor:
        return torch.cat([each.to(dtype) for each in self.ranges])


class SavedGroup(NamedTuple):
    """A parameter group, with DeepSpeed's options, and the names of its parameters."""

    options: dict[str, Any]
    names: list[str]


class SavedParameter(NamedTuple):
    """A parameter's state."""

    step: int
    master: ShardedTensor
    arrays: dict[str, ShardedTensor]


class _FlatGroup(NamedTuple):
    """A flat group.

    Attributes:
        where: its name in errors.
        shapes: the shapes of its parameters, in order.
        paddings: number of padding elements after each parameter, at stages 1 and 2.
        by_parameter: whether each parameter is sharded over the ranks by itself, as at stage 3.
    """

    where: str
    shapes: dict[str, tuple[int, ...]]
    paddings: list[int]
    by_parameter: bool

    def parameters(self, shards: Sequence[Tensor], what: str) -> dict[str, ShardedTensor]:
        """Return the group's parameters, given each rank's shard of the group.

        Raises:
            CheckpointError: the shards do not have as many elements as the parameters.
        """
        if not all(isinstance(shard, Tensor) and shard.ndim == 1 for shard in shards):
            raise CheckpointError(f"{self.where}: {what} is not a flat tensor on each rank")
        return self._each(shards, what) if self.by_parameter else self._together(shards, what)

    def _each(self, shards: Sequence[Tensor], what: str) -> dict[str, ShardedTensor]:
        found, start = {}, 0
        for name, shape in self.shapes.items():
            numel = -(-math.prod(shape) // len(shards))
            ranges = [shard[start : start + numel] for shard in shards]
            found[name] = ShardedTensor(shape, range_of(ranges, 0, math.prod(shape)))
            start += numel
        if any(shard.numel() != start for shard in shards):
            sizes = ", ".join(str(shard.numel()) for shard in shards)
            raise CheckpointError(
                f"{self.where}: {what} has {sizes} elements, and its parameters need {start} on each of {len(shards)} "
                "ranks"
            )
        return found

    def _together(self, shards: Sequence[Tensor], what: str) -> dict[str, ShardedTensor]:
        found, start = {}, 0
        for (name, shape), padding in zip(self.shapes.items(), self.paddings, strict=True):
            numel = math.prod(shape)
            found[name] = ShardedTensor(shape, range_of(shards, start, numel))
            start += numel + padding
        total = sum(shard.numel() for shard in shards)
        if not start <= total < start + _ALIGNMENT * len(shards):
            raise CheckpointError(
                f"{self.where}: {what} has {total} elements on {len(shards)} ranks, and its parameters have {start}"
            )
        return found


def range_of(shards: Sequence[Tensor], start: int, numel: int) -> list[Tensor]:
    """Return elements ``[start, start + numel)``, or as many of them as there are, of consecutive flat tensors."""
    found = []
    for shard in shards:
        values = shard[max(start, 0) : max(start + numel, 0)]
        if values.numel() > 0 or not found:
            found.append(values)
        start -= shard.numel()
    return found


def shapes_of(content: Any, where: str) -> dict[str, tuple[int, ...]]:
    """Return shapes by name, from an untrusted file. Raises CheckpointError if they are invalid."""
    found = {}
    for name, shape in checked(content, dict, where).items():
        if not isinstance(name, str) or not isinstance(shape, (tuple, list)):
            raise CheckpointError(f"{where} has an entry {name!r} that is not a shape")
        found[name] = tuple(checked(size, int, f"{where}: {name}") for size in shape)
        if math.prod(found[name]) > _LARGEST:
            raise CheckpointError(f"{where}: {name} has more elements than fit into any memory")
    return found


def read_optimizer(files: SavedFiles) -> tuple[list[SavedGroup], dict[str, SavedParameter]]:
    """Read groups and each parameter's state. Raises CheckpointError if the files contradict each other."""
    model = files.models[0]
    states = [Shard(path, checked_entry(content, _STATE, dict, str(path))) for path, content in files.optimizers]
    _check_partitions(states)
    split = _FLAT_3 in states[0].content
    master_key, base_key = (_FLAT_3, _BASE_3) if split else (_FLAT, _BASE)
    listed = checked_entry(model.content, "param_shapes", list, str(model.path))
    flats = []
    for number, content in enumerate(listed):
        where = f"{files.folder}: group {number}"
        shapes = shapes_of(content, where)
        flats.append(_FlatGroup(where, shapes, _paddings(states[0], number, len(shapes)), split))
    masters = [_entries(state, master_key, len(flats)) for state in states]
    bases = [_base_of(state, base_key, len(flats)) for state in states]
    parameters: dict[str, SavedParameter] = {}
    for number, flat in enumerate(flats):
        found = flat.parameters([each[number] for each in masters], "the master")
        step, arrays = _moments(flat, [each[number] for each in bases])
        by_array = {key: flat.parameters(shards, key) for key, shards in arrays.items()}
        for name, master in found.items():
            if name in parameters:
                raise CheckpointError(f"{flat.where}: {name} is also in another group")
            parameters[name] = SavedParameter(step, master, {key: each[name] for key, each in by_array.items()})
    return _groups(states[0], base_key, flats), parameters


def _check_partitions(states: Sequence[Shard]) -> None:
    for state in states:
        count = state.content.get("partition_count")
        counts = set(count) if isinstance(count, (list, tuple)) else {count}
        if counts - {None, len(states)}:
            raise CheckpointError(
                f"{state.path} was sharded over {counts} ranks, and there are {len(states)} ranks: subgroups of ranks "
                "(MiCS, experts) are not imported"
            )
        if (_FLAT_3 in state.content) != (_FLAT_3 in states[0].content):
            raise CheckpointError(f"{state.path} is of another stage than {states[0].path}: they are a mixture")


def _paddings(state: Shard, number: int, length: int) -> list[int]:
    content = state.content.get("param_alignment_paddings")
    if content is None:
        return [0] * length
    where = f"{state.path}: param_alignment_paddings"
    content = checked(content, list, where)
    found = checked(content[number] if number < len(content) else None, list, where)
    if len(found) != length:
        raise CheckpointError(f"{where} has {len(found)} entries of group {number}, which has {length} parameters")
    return [checked(each, int, where) for each in found]


def _entries(state: Shard, key: str, length: int) -> list[Any]:
    found = checked_entry(state.content, key, list, str(state.path))
    if len(found) != length:
        raise CheckpointError(f"{state.path}: {key} has {len(found)} groups, and the model's file lists {length}")
    return found


def _base_of(state: Shard, key: str, length: int) -> list[Mapping[str, Any]]:
    """Return the inner optimizer's state of each flat group on one rank, including ``step``."""
    base: Any = state.content.get(key)
    where = f"{state.path}: {key}"
    if isinstance(base, list):  # an "elastic" checkpoint, which has no groups
        steps = [state.content.get("base_optimizer_state_step")] * length
        inner = dict(enumerate(base))
    else:
        inner = checked_entry(base, "state", dict, where)
        steps = [None] * length
        for group in _listed(base, where):
            for number in group["params"]:
                if number < length:
                    # Older versions of DeepSpeed's fused Adam counted steps here.
                    steps[number] = group.get("step")
    if {*inner} - {*range(length)}:
        raise CheckpointError(f"{where} has the state of groups {sorted(map(str, inner))}, and there are {length}")
    return [{"step": steps[number] or 0, **checked(inner.get(number, {}), dict, where)} for number in range(length)]


def _listed(base: Any, where: str) -> list[dict[str, Any]]:
    groups = checked_entry(base, "param_groups", list, where)
    for group in groups:
        for number in checked_entry(group, "params", list, where):
            checked(number, int, f"{where}: params")
    return groups


def _moments(flat: _FlatGroup, states: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, list[Tensor]]]:
    """Return a flat group's step count, and each rank's shard of each array, by the array's name."""
    steps = {_step(state["step"], flat.where) for state in states}
    if len(steps) > 1:
        raise CheckpointError(f"{flat.where} has made {sorted(steps)} steps on different ranks: a mixture of files")
    keys = {key for state in states for key, value in state.items() if isinstance(value, Tensor) and key != "step"}
    for state in states:
        if keys - state.keys():
            raise CheckpointError(f"{flat.where}: a rank has no {', '.join(sorted(keys - state.keys()))}")
    return steps.pop(), {key: [state[key] for state in states] for key in sorted(keys)}


def plain(value: Any) -> Any:
    """Replace tensors of one element by numbers, also inside lists and tuples."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return tuple(map(plain, value)) if isinstance(value, (list, tuple)) else value


def _step(value: Any, where: str) -> int:
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 2**53 or value % 1:
        raise CheckpointError(f"{where}: step is {value!r}, which is not a count")
    return int(value)


def _groups(state: Shard, key: str, flats: Sequence[_FlatGroup]) -> list[SavedGroup]:
    base: Any = state.content.get(key)
    if isinstance(base, list):
        return [SavedGroup({}, [*flat.shapes]) for flat in flats]
    listed = _listed(base, str(state.path))
    numbers = [number for group in listed for number in group["params"]]
    if sorted(numbers) != [*range(len(flats))]:
        raise CheckpointError(
            f"{state.path}: its parameter groups have {numbers}, and there are {len(flats)} flat ones"
        )
    return [
        SavedGroup(
            {key: value for key, value in group.items() if key not in ("params", "step")},
            [name for number in group["params"] for name in flats[number].shapes],
        )
        for group in listed
    ]

"""Where DeepSpeed's files have each parameter's state.

An optimizer of DeepSpeed's steps flat groups: the elements of several parameters behind each other, of which each rank
has a part. At stages 1 and 2 the whole group is cut into as many parts as there are ranks; at stage 3 each parameter
is, and a rank's group has its part of each of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longshore.checkpoint.deepspeed_files import SavedFiles, Shard
from longshore.checkpoint.reading import checked
from longshore.errors import CheckpointError

_STATE = "optimizer_state_dict"
_FLAT, _FLAT_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
_BASE, _BASE_3 = "base_optimizer_state", "optimizer_state_dict"
_ALIGNMENT = 2
"""Times the number of ranks: flat groups are padded to a multiple of that many elements."""
_LARGEST = 1 << 62


class Gathered(NamedTuple):
    """A tensor whose elements lie in several places."""

    shape: tuple[int, ...]
    pieces: Sequence[Tensor]
    """Flat, in the order of its elements."""

    def read(self, dtype: torch.dtype) -> Tensor:
        """A copy."""
        return torch.cat([piece.to(dtype) for piece in self.pieces]).view(self.shape)


class Group(NamedTuple):
    """A parameter group."""

    options: dict[str, Any]
    """As DeepSpeed has them."""
    names: list[str]


class Stepped(NamedTuple):
    """A parameter's state."""

    step: int
    master: Gathered
    arrays: dict[str, Gathered]


class OptimizerFiles(NamedTuple):
    """What the files say of an optimizer."""

    groups: list[Group]
    parameters: dict[str, Stepped]


class _Flat(NamedTuple):
    """A flat group."""

    where: str
    """As errors name it."""
    shapes: dict[str, tuple[int, ...]]
    """Of its parameters, in their order."""
    paddings: list[int]
    """Behind each of them; stages 1 and 2."""
    split: bool
    """Each parameter over the ranks, as at stage 3."""

    def cut(self, shards: Sequence[Tensor], what: str) -> dict[str, Gathered]:
        """Its parameters, out of what each rank has of it.

        Raises:
            CheckpointError: not as many elements as they have.
        """
        if not all(isinstance(shard, Tensor) and shard.ndim == 1 for shard in shards):
            raise CheckpointError(f"{self.where}: {what} is no flat tensor on each rank")
        return self._cut_each(shards, what) if self.split else self._cut_whole(shards, what)

    def _cut_each(self, shards: Sequence[Tensor], what: str) -> dict[str, Gathered]:
        found, start = {}, 0
        for name, shape in self.shapes.items():
            part = -(-math.prod(shape) // len(shards))
            pieces = [shard[start : start + part] for shard in shards]
            found[name] = Gathered(shape, trimmed(pieces, math.prod(shape)))
            start += part
        if any(shard.numel() != start for shard in shards):
            sizes = ", ".join(str(shard.numel()) for shard in shards)
            raise CheckpointError(
                f"{self.where}: {what} has {sizes} elements, and its parameters need {start} on each of {len(shards)} "
                "ranks"
            )
        return found

    def _cut_whole(self, shards: Sequence[Tensor], what: str) -> dict[str, Gathered]:
        found, start = {}, 0
        for (name, shape), padding in zip(self.shapes.items(), self.paddings, strict=True):
            numel = math.prod(shape)
            found[name] = Gathered(shape, _run_of(shards, start, numel))
            start += numel + padding
        total = sum(shard.numel() for shard in shards)
        if not start <= total < start + _ALIGNMENT * len(shards):
            raise CheckpointError(
                f"{self.where}: {what} has {total} elements on {len(shards)} ranks, and its parameters have {start}"
            )
        return found


def trimmed(pieces: Sequence[Tensor], numel: int) -> list[Tensor]:
    """The first ``numel`` elements of flat tensors that follow each other; fewer where there are not as many."""
    return _run_of(pieces, 0, numel)


def _run_of(shards: Sequence[Tensor], start: int, numel: int) -> list[Tensor]:
    found = []
    for shard in shards:
        piece = shard[max(start, 0) : max(start + numel, 0)]
        if piece.numel() > 0 or not found:
            found.append(piece)
        start -= shard.numel()
    return found


def shapes_of(content: Any, where: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes, from a file that anybody may have written. Raises CheckpointError."""
    found = {}
    for name, shape in checked(content, dict, where).items():
        if not isinstance(name, str) or not isinstance(shape, (tuple, list)):
            raise CheckpointError(f"{where} has an entry {name!r} that is no shape")
        found[name] = tuple(checked(size, int, f"{where}: {name}") for size in shape)
        if math.prod(found[name]) > _LARGEST:
            raise CheckpointError(f"{where}: {name} has more elements than any memory has")
    return found


def read_optimizer(files: SavedFiles) -> OptimizerFiles:
    """Groups and each parameter's state. Raises CheckpointError where files do not fit each other."""
    model = files.models[0]
    states = [_inner(shard, _STATE) for shard in files.optimizers]
    _check_partitions(states)
    split = _FLAT_3 in states[0].content
    listed = checked(model.content.get("param_shapes"), list, f"{model.path}: param_shapes")
    flats = []
    for number, content in enumerate(listed):
        where = f"{files.folder}: group {number}"
        shapes = shapes_of(content, where)
        flats.append(_Flat(where, shapes, _paddings(states[0], number, len(shapes)), split))
    masters = [_entries(state, _FLAT_3 if split else _FLAT, len(flats)) for state in states]
    bases = [_base_of(state, split, len(flats)) for state in states]
    parameters: dict[str, Stepped] = {}
    for number, flat in enumerate(flats):
        found = flat.cut([each[number] for each in masters], "the master")
        step, arrays = _moments(flat, [each[number] for each in bases])
        cut = {key: flat.cut(shards, key) for key, shards in arrays.items()}
        for name, master in found.items():
            if name in parameters:
                raise CheckpointError(f"{flat.where}: {name} is in another group, too")
            parameters[name] = Stepped(step, master, {key: each[name] for key, each in cut.items()})
    return OptimizerFiles(_groups(states[0], split, flats), parameters)


def _inner(shard: Shard, key: str) -> Shard:
    return Shard(shard.path, checked(shard.content.get(key), dict, f"{shard.path}: {key}"))


def _check_partitions(states: Sequence[Shard]) -> None:
    for state in states:
        count = state.content.get("partition_count")
        counts = set(count) if isinstance(count, (list, tuple)) else {count}
        if counts - {None, len(states)}:
            raise CheckpointError(
                f"{state.path} was cut into {counts} parts, and there are {len(states)} ranks: subgroups of ranks "
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
    found = checked(state.content.get(key), list, f"{state.path}: {key}")
    if len(found) != length:
        raise CheckpointError(f"{state.path}: {key} has {len(found)} groups, and the model's file lists {length}")
    return found


def _base_of(state: Shard, split: bool, length: int) -> list[Mapping[str, Any]]:
    """Of each flat group, the inner optimizer's state on one rank, with ``step``."""
    key = _BASE_3 if split else _BASE
    base: Any = state.content.get(key)
    where = f"{state.path}: {key}"
    if isinstance(base, list):  # an "elastic" checkpoint: without the groups
        steps = [state.content.get("base_optimizer_state_step")] * length
        inner = dict(enumerate(base))
    else:
        inner = checked(checked(base, dict, where).get("state"), dict, where)
        listed = _listed(base, where)
        steps = [None] * length
        for group in listed:
            for number in group["params"]:
                if number < length:
                    # Where its fused Adam once counted, and older files have it.
                    steps[number] = group.get("step")
    if {*inner} - {*range(length)}:
        raise CheckpointError(f"{where} has the state of groups {sorted(map(str, inner))}, and there are {length}")
    found = []
    for number in range(length):
        each = checked(inner.get(number, {}), dict, where)
        found.append({"step": steps[number] or 0, **each})
    return found


def _listed(base: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    groups = checked(base.get("param_groups"), list, f"{where}: param_groups")
    for group in groups:
        for number in checked(checked(group, dict, where).get("params"), list, f"{where}: params"):
            checked(number, int, f"{where}: params")
    return groups


def _moments(flat: _Flat, states: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, list[Tensor]]]:
    """A flat group's step count, and by name what each rank has of each array."""
    steps = {_step(state["step"], flat.where) for state in states}
    if len(steps) > 1:
        raise CheckpointError(f"{flat.where} has made {sorted(steps)} steps on different ranks: a mixture of files")
    keys = {key for state in states for key, value in state.items() if isinstance(value, Tensor) and key != "step"}
    for state in states:
        if keys - state.keys():
            raise CheckpointError(f"{flat.where}: a rank has no {', '.join(sorted(keys - state.keys()))}")
    return steps.pop(), {key: [state[key] for state in states] for key in sorted(keys)}


def _step(value: Any, where: str) -> int:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 2**53 or value % 1:
        raise CheckpointError(f"{where}: step is {value!r}, not a count")
    return int(value)


def _groups(state: Shard, split: bool, flats: Sequence[_Flat]) -> list[Group]:
    base: Any = state.content.get(_BASE_3 if split else _BASE)
    if isinstance(base, list):
        return [Group({}, [*flat.shapes]) for flat in flats]
    listed = _listed(checked(base, dict, str(state.path)), str(state.path))
    numbers = [number for group in listed for number in group["params"]]
    if sorted(numbers) != [*range(len(flats))]:
        raise CheckpointError(
            f"{state.path}: its parameter groups have {numbers}, and there are {len(flats)} flat ones"
        )
    return [
        Group(
            {key: value for key, value in group.items() if key not in ("params", "step")},
            [name for number in group["params"] for name in flats[number].shapes],
        )
        for group in listed
    ]

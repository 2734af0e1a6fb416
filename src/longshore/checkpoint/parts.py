"""What a process writes of a tensor, and what it wants of one, as planners of ``torch.distributed.checkpoint``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from longshore.checkpoint.boxes import Box, boxes_of_run
from longshore.errors import CheckpointError
from longshore.layout import Slab


class SavedPart(NamedTuple):
    """A box of a tensor, which this process writes."""

    name: str
    """Of the tensor in the checkpoint."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of all of the tensor."""
    box: Box
    read: Callable[[], Tensor]
    """Its values, of the box's shape; asked for once, when they are written."""

    def copied(self) -> SavedPart:
        """As it is now, on the CPU, until it has been asked for."""
        values = [self.read().detach().to("cpu", copy=True)]
        return self._replace(read=values.pop)


class WantedPart(NamedTuple):
    """A box of a tensor, which this process loads."""

    name: str
    shape: tuple[int, ...]
    box: Box
    take: Callable[[Tensor], None]
    """Given its values, of the box's shape, in the checkpoint's dtype."""


def boxes_in(shape: tuple[int, ...], slab: Slab | None, start: int, numel: int) -> list[Box]:
    """A run of elements, in memory order, of a tensor or of a slab of it, as boxes of the tensor."""
    if slab is None:
        return boxes_of_run(shape, start, numel)
    return [box.moved(slab.dim, slab.start) for box in boxes_of_run(slab.shape_in(shape), start, numel)]


def saved_run(
    name: str, shape: Sequence[int], boxes: Sequence[Box], dtype: torch.dtype, read: Callable[[], Tensor]
) -> list[SavedPart]:
    """Parts that follow each other in memory; ``read`` gives all of them, flat."""
    held: list[Tensor] = []
    parts, start = [], 0

    def reader(start: int, box: Box, last: bool) -> Callable[[], Tensor]:
        def read_box() -> Tensor:
            if not held:
                held.append(read())
            values = held[0][start : start + box.numel].view(box.sizes)
            if last:
                held.clear()
            return values

        return read_box

    for place, box in enumerate(boxes):
        parts.append(SavedPart(name, dtype, tuple(shape), box, reader(start, box, place == len(boxes) - 1)))
        start += box.numel
    return parts


def wanted_run(
    name: str, shape: Sequence[int], boxes: Sequence[Box], dtype: torch.dtype, take: Callable[[Tensor], None]
) -> list[WantedPart]:
    """Parts that follow each other in memory; ``take`` is given all of them, flat, once they are there."""
    total = sum(box.numel for box in boxes)
    state: dict[str, Any] = {"values": None, "missing": total}

    def taker(start: int, box: Box) -> Callable[[Tensor], None]:
        def take_box(values: Tensor) -> None:
            if len(boxes) == 1:
                take(values.reshape(-1))
                return
            if state["values"] is None:
                state["values"] = torch.empty(total, dtype=dtype)
            state["values"][start : start + box.numel].copy_(values.reshape(-1))
            state["missing"] -= box.numel
            if state["missing"] == 0:
                take(state.pop("values"))

        return take_box

    parts, start = [], 0
    for box in boxes:
        parts.append(WantedPart(name, tuple(shape), box, taker(start, box)))
        start += box.numel
    return parts


class PartSavePlanner(DefaultSavePlanner):
    """Plans to write parts.

    Args:
        parts: of this process. The parts of all processes together have to be every tensor, each element once.
    """

    def __init__(self, parts: Sequence[SavedPart]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = {MetadataIndex(part.name, part.box.offsets): part for part in parts}
        assert len(self._parts) == len(parts)

    def create_local_plan(self) -> SavePlan:
        items = []
        for index, part in self._parts.items():
            chunk = ChunkStorageMetadata(torch.Size(part.box.offsets), torch.Size(part.box.sizes))
            about = TensorWriteData(chunk, TensorProperties(dtype=part.dtype), torch.Size(part.shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=about))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        part = self._parts[write_item.index]
        values = part.read()
        assert tuple(values.shape) == part.box.sizes, (part.name, values.shape, part.box)
        return values


class PartLoadPlanner(DefaultLoadPlanner):
    """Plans to read parts, each into memory of its own until all of it is there.

    Args:
        parts: of this process.

    Raises:
        CheckpointError: a tensor that is not there, has another shape, or is there in part, by name; before anything
            is read.
    """

    def __init__(self, parts: Sequence[WantedPart]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._wanted: dict[str, list[WantedPart]] = {}
        for part in parts:
            self._wanted.setdefault(part.name, []).append(part)
        self._arriving: dict[tuple[str, int], tuple[Tensor, int]] = {}
        """By name and number among the parts of that name: its memory, and how many elements are missing."""
        self._dtypes: dict[str, torch.dtype] = {}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, parts in self._wanted.items():
            about = stored(self.metadata, name)
            self._dtypes[name] = about.properties.dtype
            if tuple(about.size) != parts[0].shape:
                raise CheckpointError(f"{name} is {list(about.size)} in the checkpoint, not {list(parts[0].shape)}")
            chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for _, _, box, _ in parts]
            for part in parts:
                if part.box.numel == 0:
                    part.take(torch.empty(part.box.sizes, dtype=about.properties.dtype))
            found = create_read_items_for_chunk_list(name, about, chunks)
            missing = sum(part.box.numel for part in parts) - sum(item.lengths.numel() for item in found)
            if missing != 0:
                raise CheckpointError(f"{name}: {abs(missing)} elements are missing in the checkpoint, or there twice")
            items += sorted(found, key=lambda item: item.dest_index.index or 0)
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        key = (read_item.dest_index.fqn, read_item.dest_index.index or 0)
        if key not in self._arriving:
            box = self._wanted[key[0]][key[1]].box
            self._arriving[key] = torch.empty(box.sizes, dtype=self._dtypes[key[0]]), box.numel
        values, _ = self._arriving[key]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            values = values.narrow(dim, start, length)
        return values

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        key = (read_item.dest_index.fqn, read_item.dest_index.index or 0)
        values, missing = self._arriving.pop(key)
        missing -= tensor.numel()
        if missing > 0:
            self._arriving[key] = values, missing
        else:
            self._wanted[key[0]][key[1]].take(values)


def stored(metadata: Metadata, name: str) -> TensorStorageMetadata:
    """What a checkpoint says of a tensor. Raises CheckpointError where it has none of that name."""
    about = metadata.state_dict_metadata.get(name)
    if not isinstance(about, TensorStorageMetadata):
        raise CheckpointError(f"the checkpoint has no {name}")
    return about


def names_of(metadata: Metadata) -> Mapping[str, TensorStorageMetadata]:
    return {
        name: about for name, about in metadata.state_dict_metadata.items() if isinstance(about, TensorStorageMetadata)
    }

"""Boxes, in which tensors are saved and loaded, and planners of ``torch.distributed.checkpoint`` for them.

A rank often has the state of a range of a parameter's elements in memory order. A box has offsets and sizes in the
dimensions of the tensor, so that a checkpoint can be read with any other sharding.
"""

from __future__ import annotations

import math
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
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from longshore.errors import CheckpointError
from longshore.layout import Slab


class Box(NamedTuple):
    """Elements ``[offsets[d], offsets[d] + sizes[d])`` of each dimension ``d``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def stored(self) -> ChunkStorageMetadata:
        """The box in torch's terms."""
        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))

    def moved(self, dim: int, by: int) -> Box:
        """The box in a larger tensor, of which this one is a slice along ``dim`` that begins at ``by``."""
        return Box((*self.offsets[:dim], self.offsets[dim] + by, *self.offsets[dim + 1 :]), self.sizes)


def boxes_of_range(shape: Sequence[int], start: int, numel: int) -> list[Box]:
    """Elements ``[start, start + numel)`` of a tensor in memory order, as the fewest boxes that follow each other.

    At most ``2 * len(shape) - 1``; each is contiguous in the tensor. ``numel`` 0: none.

    Raises:
        ValueError: the tensor does not have these elements.
    """
    total = math.prod(shape)
    if start < 0 or numel < 0 or start + numel > total:
        raise ValueError(f"a tensor of shape {list(shape)} has no elements [{start}, {start + numel})")
    if numel == 0:
        return []
    if numel == total:
        return [Box.whole(shape)]
    inner_shape = shape[1:]
    inner = math.prod(inner_shape)
    row, head = divmod(start, inner)
    end_row, tail = divmod(start + numel, inner)
    if row == end_row or (row + 1 == end_row and tail == 0 and head):
        return _in_row(row, boxes_of_range(inner_shape, head, numel))
    boxes = []
    if head:
        boxes += _in_row(row, boxes_of_range(inner_shape, head, inner - head))
        row += 1
    if row < end_row:
        boxes.append(Box((row, *(0,) * len(inner_shape)), (end_row - row, *inner_shape)))
    if tail:
        boxes += _in_row(end_row, boxes_of_range(inner_shape, 0, tail))
    return boxes


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in boxes]


class SavedBox(NamedTuple):
    """A box of a tensor, which this process writes.

    Attributes:
        name: of the tensor in the checkpoint.
        shape: of the whole tensor.
        read: returns the values, of the box's shape; called once, when they are written.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box
    read: Callable[[], Tensor]

    def copied(self) -> SavedBox:
        """A copy of the current values on the CPU, kept until they are read."""
        values = [self.read().detach().to("cpu", copy=True)]
        return self._replace(read=values.pop)


class WantedBox(NamedTuple):
    """A box of a tensor, which this process loads; ``take`` is called with its values, in the checkpoint's dtype."""

    name: str
    shape: tuple[int, ...]
    box: Box
    take: Callable[[Tensor], None]


def boxes_in(shape: tuple[int, ...], slab: Slab | None, start: int, numel: int) -> list[Box]:
    """A range of elements, in memory order, of a tensor or of a slice of it, as boxes of the tensor."""
    if slab is None:
        return boxes_of_range(shape, start, numel)
    return [box.moved(slab.dim, slab.start) for box in boxes_of_range(slab.shape_in(shape), start, numel)]


def saved_range(
    name: str, shape: Sequence[int], boxes: Sequence[Box], dtype: torch.dtype, read: Callable[[], Tensor]
) -> list[SavedBox]:
    """Boxes that follow each other in memory; ``read`` returns all of them, flat."""
    cached: list[Tensor] = []
    found, start = [], 0

    def reader(start: int, box: Box, last: bool) -> Callable[[], Tensor]:
        def read_box() -> Tensor:
            if not cached:
                cached.append(read())
            values = cached[0][start : start + box.numel].view(box.sizes)
            if last:
                cached.clear()
            return values

        return read_box

    for place, box in enumerate(boxes):
        found.append(SavedBox(name, dtype, tuple(shape), box, reader(start, box, place == len(boxes) - 1)))
        start += box.numel
    return found


def wanted_range(
    name: str, shape: Sequence[int], boxes: Sequence[Box], dtype: torch.dtype, take: Callable[[Tensor], None]
) -> list[WantedBox]:
    """Boxes that follow each other in memory; ``take`` is called with all of them, flat, once they are read."""
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

    found, start = [], 0
    for box in boxes:
        found.append(WantedBox(name, tuple(shape), box, taker(start, box)))
        start += box.numel
    return found


class BoxSavePlanner(DefaultSavePlanner):
    """Plans to write boxes.

    Args:
        boxes: this process's. The boxes of all processes together have to cover every tensor, each element once.
    """

    def __init__(self, boxes: Sequence[SavedBox]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._boxes = {MetadataIndex(saved.name, saved.box.offsets): saved for saved in boxes}
        assert len(self._boxes) == len(boxes)

    def create_local_plan(self) -> SavePlan:
        items = []
        for index, saved in self._boxes.items():
            about = TensorWriteData(saved.box.stored(), TensorProperties(dtype=saved.dtype), torch.Size(saved.shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=about))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        saved = self._boxes[write_item.index]
        values = saved.read()
        assert tuple(values.shape) == saved.box.sizes, (saved.name, values.shape, saved.box)
        return values


class BoxLoadPlanner(DefaultLoadPlanner):
    """Plans to read boxes, each into its own memory until it is complete.

    Args:
        boxes: this process's.

    Raises:
        CheckpointError: a tensor that is missing, incomplete or of another shape, by name; before anything is read.
    """

    def __init__(self, boxes: Sequence[WantedBox]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._wanted: dict[str, list[WantedBox]] = {}
        for wanted in boxes:
            self._wanted.setdefault(wanted.name, []).append(wanted)
        self._arriving: dict[tuple[str, int], tuple[Tensor, int]] = {}
        """Memory, and the number of missing elements, by name and number among the boxes of that name."""
        self._dtypes: dict[str, torch.dtype] = {}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, boxes in self._wanted.items():
            about = stored(self.metadata, name)
            self._dtypes[name] = about.properties.dtype
            if tuple(about.size) != boxes[0].shape:
                raise CheckpointError(f"{name} is {list(about.size)} in the checkpoint, not {list(boxes[0].shape)}")
            for wanted in boxes:
                if wanted.box.numel == 0:
                    wanted.take(torch.empty(wanted.box.sizes, dtype=about.properties.dtype))
            found = create_read_items_for_chunk_list(name, about, [wanted.box.stored() for wanted in boxes])
            missing = sum(wanted.box.numel for wanted in boxes) - sum(item.lengths.numel() for item in found)
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
    """The metadata of a tensor. Raises CheckpointError if the checkpoint does not have it."""
    about = metadata.state_dict_metadata.get(name)
    if not isinstance(about, TensorStorageMetadata):
        raise CheckpointError(f"the checkpoint has no {name}")
    return about


def tensors_of(metadata: Metadata) -> Mapping[str, TensorStorageMetadata]:
    """The metadata of all tensors, by name."""
    return {
        name: about for name, about in metadata.state_dict_metadata.items() if isinstance(about, TensorStorageMetadata)
    }

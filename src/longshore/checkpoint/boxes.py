"""Boxes in the files of a checkpoint: locate, write and read them.

A rank often has the state of a range of a parameter's elements in memory order. A box has offsets and sizes in the
dimensions of the tensor, so that a checkpoint can be read with any other sharding. The metadata is JSON and names the
file of each box; the values are in safetensors files.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longshore.checkpoint.files import (
    DTYPE_NAMES,
    SAVED_DTYPES,
    TensorFile,
    TensorHead,
    WrittenFile,
    checked,
    checked_entry,
    is_file_name,
    opened,
    read_json,
)
from longshore.errors import CheckpointError
from longshore.layout.boxes import Box

METADATA = "metadata.json"
_MOST_DIMENSIONS = 64
_MOST_ELEMENTS = 1 << 62
_MOST_COMPARISONS = 1 << 10
"""Largest number of comparisons for each box when checking for overlaps. Real checkpoints need fewer."""


class SavedBoxes(NamedTuple):
    """Boxes of a tensor that this process writes; their values are consecutive in memory.

    Attributes:
        name: the name of the tensor in the checkpoint.
        shape: the shape of the whole tensor.
        read: returns the values: flat, or in any shape if there is one box; called once, when they are written.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: Sequence[Box]
    read: Callable[[], Tensor]

    def copied(self) -> SavedBoxes:
        """Copy the current values to the CPU, where they are kept until they are read."""
        values = [self.read().detach().to("cpu", copy=True)]
        return self._replace(read=values.pop)

    def heads(self) -> list[TensorHead]:
        """Return the header entries of the boxes, each of which is a tensor of the file."""
        suffixes = ["" if box.sizes == self.shape else f"@{','.join(map(str, box.offsets))}" for box in self.boxes]
        named = zip(suffixes, self.boxes, strict=True)
        return [TensorHead(self.name + suffix, self.dtype, box.sizes) for suffix, box in named]


class WantedBoxes(NamedTuple):
    """Boxes of a tensor that this process loads.

    Attributes:
        name: the name of the tensor in the checkpoint.
        shape: the shape of the whole tensor.
        take: called once with the concatenated values of all boxes, flat and in the checkpoint's dtype.
    """

    name: str
    shape: tuple[int, ...]
    boxes: Sequence[Box]
    take: Callable[[Tensor], None]


def write_boxes(
    folder: Path, saved: Iterable[SavedBoxes], rank: int, world_size: int
) -> tuple[list[WrittenFile], dict[str, Any]]:
    """Write this rank's boxes into one file for each kind of tensor (the part of its name before the first dot).

    Returns:
        The files, and the metadata of the boxes.
    """
    kinds: dict[str, list[SavedBoxes]] = {}
    tensors: dict[str, Any] = {}
    for each in saved:
        kind = each.name.partition(".")[0]
        file = f"{kind}-{rank:05d}-of-{world_size:05d}.safetensors"
        kinds.setdefault(file, []).append(each)
        about = {"dtype": DTYPE_NAMES.get(each.dtype), "shape": list(each.shape), "chunks": []}
        tensors.setdefault(each.name, about)["chunks"] += [
            {"offsets": list(box.offsets), "sizes": list(box.sizes), "file": file, "tensor": head.name}
            for box, head in zip(each.boxes, each.heads(), strict=True)
        ]
    written = []
    for name, group in kinds.items():
        group.sort(key=lambda each: -each.dtype.itemsize)  # the order in which TensorFile writes
        with TensorFile(folder / name, [head for each in group for head in each.heads()]) as file:
            for each in group:
                values = each.read()
                for part in [values] if len(each.boxes) == 1 else values.split([box.numel for box in each.boxes]):
                    file.write(part)
            written.append(file.finish())
    return written, tensors


class StoredBox(NamedTuple):
    """The location of a box: a file, and the name of a tensor in it."""

    box: Box
    file: str
    tensor: str


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint; its boxes cover it, and no two overlap."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: list[StoredBox]


class BoxReader:
    """Reads boxes of a checkpoint's tensors. Only the requested part of each file is read.

    Args:
        path: the checkpoint's folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @functools.cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """The metadata of all tensors, by name. Raises CheckpointError if it is damaged or impossible."""
        return parsed_metadata(read_json(self.path / METADATA), str(self.path / METADATA))

    def tensor(self, name: str) -> StoredTensor:
        """Return the metadata of a tensor. Raises CheckpointError if the checkpoint does not have it."""
        if name not in self.tensors:
            raise CheckpointError(f"the checkpoint has no {name}")
        return self.tensors[name]

    def of_kind(self, kind: str) -> dict[str, StoredTensor]:
        """Return the metadata of the tensors whose names begin with ``kind`` and a dot, by the rest of the name."""
        prefix = f"{kind}."
        return {name.removeprefix(prefix): about for name, about in self.tensors.items() if name.startswith(prefix)}

    def files(self) -> set[str]:
        """Return the names of all files with boxes."""
        return {source.file for about in self.tensors.values() for source in about.boxes}

    def check(self, wanted: Iterable[WantedBoxes]) -> None:
        """Check everything that will be read, by reading only the metadata and the files' headers.

        Raises:
            CheckpointError: a tensor is missing or has another shape; a file does not agree with the metadata.
        """
        files: dict[str, dict[tuple[str, StoredBox], StoredTensor]] = {}
        for each in wanted:
            about = self.tensor(each.name)
            if about.shape != each.shape:
                raise CheckpointError(f"{each.name} is {list(about.shape)} in the checkpoint, not {list(each.shape)}")
            for box in each.boxes:
                sources = self._sources(about, box)
                missing = box.numel - sum(common.numel for _, common in sources)
                if missing != 0:
                    raise CheckpointError(
                        f"{each.name}: {abs(missing)} elements are missing in the checkpoint, or there twice"
                    )
                for source, _ in sources:
                    files.setdefault(source.file, {})[each.name, source] = about
        for name, sources in files.items():
            with opened(self.path / name) as file:
                for (_, source), about in sources.items():
                    self._checked_slice(file, about, source)

    def read(self, wanted: Iterable[WantedBoxes]) -> None:
        """Read boxes, after :meth:`check`. Raises CheckpointError if a file was changed, OSError if the disk fails."""
        with contextlib.ExitStack() as stack:
            files: dict[str, Any] = {}
            for each in wanted:
                about = self.tensor(each.name)
                values = torch.empty(sum(box.numel for box in each.boxes), dtype=about.dtype)
                parts = values.split([box.numel for box in each.boxes])
                for box, part in zip(each.boxes, parts, strict=True):
                    for source, common in self._sources(about, box):
                        if source.file not in files:
                            files[source.file] = stack.enter_context(opened(self.path / source.file))
                        found = self._read(files[source.file], about, source, common)
                        part.view(box.sizes)[common.slices_in(box)].copy_(found)
                each.take(values)

    @staticmethod
    def _sources(about: StoredTensor, box: Box) -> list[tuple[StoredBox, Box]]:
        """Return the stored boxes that have elements of ``box``, each with the elements in common."""
        found = [(source, source.box.common(box)) for source in about.boxes]
        return [(source, common) for source, common in found if common is not None]

    def _read(self, file: Any, about: StoredTensor, source: StoredBox, common: Box) -> Tensor:
        found = self._checked_slice(file, about, source)
        # A slice of 0 dimensions cannot be indexed.
        return file[0].get_tensor(source.tensor) if common == source.box else found[common.slices_in(source.box)]

    def _checked_slice(self, file: tuple[Any, frozenset[str]], about: StoredTensor, source: StoredBox) -> Any:
        """Return a slice object that reads parts of a stored box, after checking the box's shape and dtype."""
        handle, names = file
        where = self.path / source.file
        if source.tensor not in names:
            raise CheckpointError(f"{where} has no {source.tensor}, which {METADATA} names")
        found = handle.get_slice(source.tensor)
        shape, dtype = tuple(found.get_shape()), found.get_dtype()
        if (shape, SAVED_DTYPES.get(dtype)) != (source.box.sizes, about.dtype):
            raise CheckpointError(f"{where}: {source.tensor} is {dtype} {list(shape)}, and {METADATA} says otherwise")
        return found


def parsed_metadata(content: Any, where: str) -> dict[str, StoredTensor]:
    """Parse metadata from untrusted JSON. Raises CheckpointError, which names the tensor and its fault."""
    tensors: dict[str, StoredTensor] = {}
    for name, about in checked_entry(content, "tensors", dict, where).items():
        at = f"{where}: {name}"
        dtype = SAVED_DTYPES.get(checked_entry(about, "dtype", str, at))
        if dtype is None:
            raise CheckpointError(f"{at} has the dtype {about['dtype']!r}, which safetensors does not have")
        shape = _numbers(about, "shape", at)
        if math.prod(size or 1 for size in shape) > _MOST_ELEMENTS:
            raise CheckpointError(f"{at} has more elements than fit into any memory")
        boxes = []
        for entry in checked_entry(about, "chunks", list, at):
            found = checked(entry, dict, f"{at}: chunks")
            box = Box(_numbers(found, "offsets", at), _numbers(found, "sizes", at))
            file = checked_entry(found, "file", str, at)
            if not is_file_name(file):
                raise CheckpointError(f"{at} is said to be in {file!r}, which is not a valid file name")
            boxes.append(StoredBox(box, file, checked_entry(found, "tensor", str, at)))
        _check_boxes(shape, [each.box for each in boxes], at)
        tensors[name] = StoredTensor(dtype, shape, boxes)
    return tensors


def _numbers(content: Any, key: str, where: str) -> tuple[int, ...]:
    found = checked_entry(content, key, list, where)
    if len(found) > _MOST_DIMENSIONS:
        raise CheckpointError(f"{where}: {key} has {len(found)} dimensions")
    return tuple(checked(number, int, f"{where}: {key}") for number in found)


def _check_boxes(shape: Sequence[int], boxes: Sequence[Box], where: str) -> None:
    """Check that boxes cover the tensor and that no two overlap."""
    for box in boxes:
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            raise CheckpointError(f"{where} has a box of other dimensions than its shape {list(shape)}")
        if any(start + size > whole for start, size, whole in zip(*box, shape, strict=True)):
            raise CheckpointError(f"{where} has a box at {list(box.offsets)} that is beyond its shape {list(shape)}")
    if sum(box.numel for box in boxes) != math.prod(shape):
        raise CheckpointError(f"{where}: its boxes do not have as many elements as its shape {list(shape)}")
    if len({box.offsets for box in boxes}) < len(boxes):
        raise CheckpointError(f"{where} has two boxes that begin at the same element")
    if _some_overlap(shape, [box for box in boxes if box.numel > 0], where):
        raise CheckpointError(f"{where} has boxes that overlap")


def _some_overlap(shape: Sequence[int], boxes: Sequence[Box], where: str) -> bool:
    """Return whether any boxes overlap. All are within the shape, and have as many elements as it in total."""
    divided = [dim for dim, size in enumerate(shape) if any(box.sizes[dim] < size for box in boxes)]
    if len(boxes) <= min(1 << len(divided), _MOST_COMPARISONS):
        return any(one.common(other) for one, other in itertools.combinations(boxes, 2))
    if 1 << len(divided) > _MOST_COMPARISONS:
        raise CheckpointError(f"{where} has {len(boxes)} boxes, divided in {len(divided)} dimensions")
    # Sum the corners of all boxes with alternating signs. Where boxes touch, their corners cancel; every element is in
    # exactly one box if only the corners of the whole tensor remain. This needs one pass over all boxes.
    corners: Counter[tuple[int, ...]] = Counter()
    for box in boxes:
        ends = [((box.offsets[dim], 1), (box.offsets[dim] + box.sizes[dim], -1)) for dim in divided]
        for corner in itertools.product(*ends):
            corners[tuple(place for place, _ in corner)] += math.prod(sign for _, sign in corner)
    whole = itertools.product(*(((0, 1), (shape[dim], -1)) for dim in divided))
    for corner in whole:
        corners[tuple(place for place, _ in corner)] -= math.prod(sign for _, sign in corner)
    return any(corners.values())

"""Storage for ``torch.distributed.checkpoint``: metadata in JSON, tensors in safetensors files, no pickle.

The part of a tensor's name before its first dot names the kind of file that it is written to.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from longshore.checkpoint.boxes import Box, stored, tensors_of
from longshore.checkpoint.reading import checked, is_file_name, read_json
from longshore.checkpoint.tensor_file import (
    DTYPE_NAMES,
    DTYPES,
    TensorFile,
    TensorHead,
    WrittenFile,
    dtype_name,
    write_json,
)
from longshore.errors import CheckpointError

METADATA = "metadata.json"
_MOST_DIMENSIONS = 64
_MOST_ELEMENTS = 1 << 62
_MOST_COMPARISONS = 1 << 10
"""Comparisons for each box of a tensor, to check that no two overlap. Real checkpoints need fewer."""


class Location(NamedTuple):
    """Where a box is: a file, and the name of a tensor in it."""

    file: str
    tensor: str


def _done(value: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class SafetensorsWriter(StorageWriter):
    """Writes tensors, each rank into its own files, and the metadata of all of them.

    Args:
        path: an existing folder, without files of this rank.
        rank, world_size: of this process.

    Attributes:
        files: those that this rank has written.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int = 0, world_size: int = 1) -> None:
        self.path = Path(path)
        self._suffix = f"-{rank:05d}-of-{world_size:05d}.safetensors"
        self.files: list[WrittenFile] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)
        self.files = []

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO or item.tensor_data is None:
                raise CheckpointError(f"{item.index.fqn} is not a tensor, and this format has no pickles")
            dtype_name(item.tensor_data.properties.dtype, item.index.fqn)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        by_kind: dict[str, dict[str, WriteItem]] = {}
        for item in plan.items:
            kind = item.index.fqn.partition(".")[0]
            by_kind.setdefault(kind, {})[_name_in_file(item)] = item
        results = []
        for kind, items in by_kind.items():
            heads = [_head(name, item) for name, item in items.items()]
            with TensorFile(self.path / f"{kind}{self._suffix}", heads) as file:
                for head in file.heads:
                    values = planner.resolve_data(items[head.name])
                    assert isinstance(values, torch.Tensor)
                    file.write(values)
                    where = Location(file.path.name, head.name)
                    results.append(WriteResult(items[head.name].index, head.num_bytes, where))
                self.files.append(file.finish())
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for each in results for result in each}
        tensors = {}
        for name, about in tensors_of(metadata).items():
            boxes = [
                {"offsets": list(box.offsets), "sizes": list(box.sizes), **where._asdict()}
                for box in about.chunks
                for where in [places[MetadataIndex(name, box.offsets)]]
            ]
            dtype = DTYPE_NAMES[about.properties.dtype]
            tensors[name] = {"dtype": dtype, "shape": list(about.size), "chunks": boxes}
        self.files.append(write_json(self.path / METADATA, {"tensors": tensors}))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in str(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.path)


def _name_in_file(item: WriteItem) -> str:
    assert item.tensor_data is not None
    if item.tensor_data.chunk.sizes == item.tensor_data.size:
        return item.index.fqn
    return f"{item.index.fqn}@{','.join(map(str, item.tensor_data.chunk.offsets))}"


def _head(name: str, item: WriteItem) -> TensorHead:
    assert item.tensor_data is not None
    return TensorHead(name, item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes))


class SafetensorsReader(StorageReader):
    """Reads the folder of a :class:`SafetensorsWriter`; of each file only what is asked for."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._metadata: Metadata | None = None
        self._sizes: dict[MetadataIndex, torch.Size] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)
        self._metadata = None
        self._sizes = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of all tensors. Raises CheckpointError if it is damaged or impossible."""
        if self._metadata is None:
            self._metadata = parsed_metadata(read_json(self.path / METADATA), str(self.path / METADATA))
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def check(self, plan: LoadPlan, metadata: Metadata) -> None:
        """Check that everything that will be read agrees with the metadata, by reading only the files' headers.

        Raises:
            CheckpointError: a file or a tensor is missing, or has another shape or dtype.
        """
        self._metadata = metadata
        by_file: dict[str, dict[MetadataIndex, ReadItem]] = {}
        for item in plan.items:
            where: Location = metadata.storage_data[item.storage_index]
            by_file.setdefault(where.file, {})[item.storage_index] = item
        for name, items in by_file.items():
            with opened(self.path / name) as file:
                names = frozenset(file.keys())
                for index, item in items.items():
                    self._checked_slice(file, names, metadata.storage_data[index], item)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert self._metadata is not None
        with contextlib.ExitStack() as stack:
            files: dict[str, tuple[Any, frozenset[str]]] = {}
            for item in plan.items:
                where: Location = self._metadata.storage_data[item.storage_index]
                if where.file not in files:
                    file = stack.enter_context(opened(self.path / where.file))
                    files[where.file] = file, frozenset(file.keys())
                values = self._read(*files[where.file], where, item)
                target = planner.resolve_tensor(item).detach()
                target.copy_(values)
                planner.commit_tensor(item, target)
        return _done(None)

    def _read(self, file: Any, names: frozenset[str], where: Location, item: ReadItem) -> torch.Tensor:
        found = self._checked_slice(file, names, where, item)
        if tuple(item.lengths) == tuple(found.get_shape()):
            return file.get_tensor(where.tensor)
        ends = zip(item.storage_offsets, item.lengths, strict=True)
        return found[tuple(slice(start, start + length) for start, length in ends)]

    def _checked_slice(self, file: Any, names: frozenset[str], where: Location, item: ReadItem) -> Any:
        """A tensor of a file, of which parts can be read, after checking its shape and dtype."""
        assert self._metadata is not None
        name = item.storage_index.fqn
        about = stored(self._metadata, name)
        if item.storage_index not in self._sizes:
            self._sizes.update({MetadataIndex(name, box.offsets): box.sizes for box in about.chunks})
        sizes = self._sizes[item.storage_index]
        if where.tensor not in names:
            raise CheckpointError(f"{self.path / where.file} has no {where.tensor}, which {METADATA} names")
        found = file.get_slice(where.tensor)
        shape, dtype = tuple(found.get_shape()), DTYPES.get(found.get_dtype())
        if (shape, dtype) != (tuple(sizes), about.properties.dtype):
            raise CheckpointError(
                f"{self.path / where.file}: {where.tensor} is {found.get_dtype()} {list(shape)}, and {METADATA} says "
                "otherwise"
            )
        return found

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Path(checkpoint_id) / METADATA).is_file()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Map a safetensors file. Raises CheckpointError if it is not one."""
    from safetensors import SafetensorError, safe_open

    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    with file:
        try:
            yield file
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error


def parsed_metadata(content: Any, where: str) -> Metadata:
    """Parse metadata from untrusted JSON. Raises CheckpointError with the tensor, and what is wrong with it."""
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, Location] = {}
    for name, entry in checked(checked(content, dict, where).get("tensors"), dict, f"{where}: tensors").items():
        at = f"{where}: {name}"
        entry = checked(entry, dict, at)
        dtype = DTYPES.get(checked(entry.get("dtype"), str, f"{at}: dtype"))
        if dtype is None:
            raise CheckpointError(f"{at} has the dtype {entry['dtype']!r}, which safetensors does not have")
        shape = _numbers(entry.get("shape"), f"{at}: shape")
        if math.prod(size or 1 for size in shape) > _MOST_ELEMENTS:
            raise CheckpointError(f"{at} has more elements than fit into any memory")
        boxes = []
        for stored_box in checked(entry.get("chunks"), list, f"{at}: chunks"):
            found = checked(stored_box, dict, f"{at}: chunks")
            box = Box(_numbers(found.get("offsets"), f"{at}: offsets"), _numbers(found.get("sizes"), f"{at}: sizes"))
            file, tensor = (checked(found.get(key), str, f"{at}: {key}") for key in ("file", "tensor"))
            if not is_file_name(file):
                raise CheckpointError(f"{at} is said to be in {file!r}, which is not a valid file name")
            places[MetadataIndex(name, box.offsets)] = Location(file, tensor)
            boxes.append(box)
        _check_boxes(shape, boxes, at)
        chunks = [box.stored() for box in boxes]
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)
    return Metadata(tensors, storage_data=places)


def _numbers(value: Any, where: str) -> tuple[int, ...]:
    found = checked(value, list, where)
    if len(found) > _MOST_DIMENSIONS:
        raise CheckpointError(f"{where} has {len(found)} dimensions")
    return tuple(checked(entry, int, where) for entry in found)


def _check_boxes(shape: Sequence[int], boxes: Sequence[Box], where: str) -> None:
    """Check that boxes cover the tensor, and no two overlap."""
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
    """Whether boxes overlap that have as many elements as the shape, and are all within it."""
    divided = [dim for dim, size in enumerate(shape) if any(box.sizes[dim] < size for box in boxes)]
    if len(boxes) <= min(1 << len(divided), _MOST_COMPARISONS):
        return any(_overlap(one, other) for one, other in itertools.combinations(boxes, 2))
    if 1 << len(divided) > _MOST_COMPARISONS:
        raise CheckpointError(f"{where} has {len(boxes)} boxes, divided in {len(divided)} dimensions")
    # Each element is in exactly one box if the mixed differences of the number of boxes at each element are those of
    # the whole tensor: summed with signs at the corners, touching boxes cancel. That is one pass over all boxes.
    corners: Counter[tuple[int, ...]] = Counter()
    for box in boxes:
        ends = [((box.offsets[dim], 1), (box.offsets[dim] + box.sizes[dim], -1)) for dim in divided]
        for corner in itertools.product(*ends):
            corners[tuple(place for place, _ in corner)] += math.prod(sign for _, sign in corner)
    whole = itertools.product(*(((0, 1), (shape[dim], -1)) for dim in divided))
    for corner in whole:
        corners[tuple(place for place, _ in corner)] -= math.prod(sign for _, sign in corner)
    return any(corners.values())


def _overlap(one: Box, other: Box) -> bool:
    return all(
        max(start, other_start) < min(start + size, other_start + other_size)
        for start, size, other_start, other_size in zip(*one, *other, strict=True)
    )

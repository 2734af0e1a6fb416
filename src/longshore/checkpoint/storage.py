"""Storage for ``torch.distributed.checkpoint``: metadata in JSON, tensors in safetensors files, no pickle.

A name of a tensor says which kind of file it goes into: what stands before its first dot.
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
    ChunkStorageMetadata,
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

from longshore.checkpoint.boxes import Box
from longshore.checkpoint.parts import names_of, stored
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
"""For each chunk of a tensor: what it takes to see that no two overlap. Nobody cuts tensors in so many ways."""


class Location(NamedTuple):
    """Where a chunk is."""

    file: str
    tensor: str
    """Its name in the file."""


def _done(value: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class SafetensorsWriter(StorageWriter):
    """Writes tensors, each process into files of its own, and the metadata of all of them.

    Args:
        path: a folder that is there. No file of a process's rank may be there yet.
        rank, world_size: of this process.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int = 0, world_size: int = 1) -> None:
        self.path = Path(path)
        self._suffix = f"-{rank:05d}-of-{world_size:05d}.safetensors"
        self.files: list[WrittenFile] = []
        """That this process wrote."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)
        self.files = []

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO or item.tensor_data is None:
                raise CheckpointError(f"{item.index.fqn} is no tensor, and this format would have to pickle it")
            dtype_name(item.tensor_data.properties.dtype, item.index.fqn)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        by_kind: dict[str, dict[str, WriteItem]] = {}
        for item in plan.items:
            kind = item.index.fqn.partition(".")[0]
            by_kind.setdefault(kind, {})[_chunk_name(item)] = item
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
        for name, about in names_of(metadata).items():
            chunks = []
            for chunk in about.chunks:
                file, tensor = places[MetadataIndex(name, chunk.offsets)]
                chunks.append(
                    {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), "file": file, "tensor": tensor}
                )
            dtype = DTYPE_NAMES[about.properties.dtype]
            tensors[name] = {"dtype": dtype, "shape": list(about.size), "chunks": chunks}
        self.files.append(write_json(self.path / METADATA, {"tensors": tensors}))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in str(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.path)


def _chunk_name(item: WriteItem) -> str:
    assert item.tensor_data is not None
    if item.tensor_data.chunk.sizes == item.tensor_data.size:
        return item.index.fqn
    return f"{item.index.fqn}@{','.join(map(str, item.tensor_data.chunk.offsets))}"


def _head(name: str, item: WriteItem) -> TensorHead:
    assert item.tensor_data is not None
    return TensorHead(name, item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes))


class SafetensorsReader(StorageReader):
    """Reads what :class:`SafetensorsWriter` wrote; of each file only what is asked for.

    Args:
        path: the folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._metadata: Metadata | None = None
        self._sizes: dict[MetadataIndex, torch.Size] = {}
        """Of the chunks that are to be read."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)
        self._metadata = None
        self._sizes = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What tensors there are.

        Raises:
            CheckpointError: it is damaged, or says what cannot be.
        """
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
        """All that is going to be read is there, as the metadata say; only the files' heads are looked at.

        Raises:
            CheckpointError: a file or a tensor is not there, or another one.
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
        """A tensor of a file, to be read in part."""
        assert self._metadata is not None
        name = item.storage_index.fqn
        about = stored(self._metadata, name)
        if item.storage_index not in self._sizes:
            self._sizes.update({MetadataIndex(name, chunk.offsets): chunk.sizes for chunk in about.chunks})
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
    """A safetensors file, mapped. Raises CheckpointError where it is none."""
    from safetensors import SafetensorError, safe_open

    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise CheckpointError(f"{path} is no regular file")
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    with file:
        try:
            yield file
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error


def parsed_metadata(content: Any, where: str) -> Metadata:
    """Metadata from JSON that anybody may have written.

    Raises:
        CheckpointError: naming the tensor, and what is wrong with it.
    """
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, Location] = {}
    for name, entry in checked(checked(content, dict, where).get("tensors"), dict, f"{where}: tensors").items():
        at = f"{where}: {name}"
        entry = checked(entry, dict, at)
        dtype = DTYPES.get(checked(entry.get("dtype"), str, f"{at}: dtype"))
        if dtype is None:
            raise CheckpointError(f"{at} has the dtype {entry['dtype']!r}, which is none of safetensors")
        shape = _numbers(entry.get("shape"), f"{at}: shape")
        if math.prod(size or 1 for size in shape) > _MOST_ELEMENTS:
            raise CheckpointError(f"{at} has a shape of more elements than any memory has")
        boxes = []
        for chunk in checked(entry.get("chunks"), list, f"{at}: chunks"):
            chunk = checked(chunk, dict, f"{at}: chunks")
            box = Box(_numbers(chunk.get("offsets"), f"{at}: offsets"), _numbers(chunk.get("sizes"), f"{at}: sizes"))
            file, tensor = (checked(chunk.get(key), str, f"{at}: {key}") for key in ("file", "tensor"))
            if not is_file_name(file):
                raise CheckpointError(f"{at} is said to be in {file!r}, which is no name of a file")
            places[MetadataIndex(name, box.offsets)] = Location(file, tensor)
            boxes.append(box)
        _check_boxes(shape, boxes, at)
        tensors[name] = TensorStorageMetadata(
            TensorProperties(dtype=dtype),
            torch.Size(shape),
            [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes],
        )
    return Metadata(tensors, storage_data=places)


def _numbers(value: Any, where: str) -> tuple[int, ...]:
    found = checked(value, list, where)
    if len(found) > _MOST_DIMENSIONS:
        raise CheckpointError(f"{where} has {len(found)} dimensions")
    return tuple(checked(entry, int, where) for entry in found)


def _check_boxes(shape: Sequence[int], boxes: Sequence[Box], where: str) -> None:
    """Together they are the tensor, and no two have an element in common."""
    for box in boxes:
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            raise CheckpointError(f"{where} has a chunk of other dimensions than its shape {list(shape)}")
        if any(start + size > whole for start, size, whole in zip(*box, shape, strict=True)):
            raise CheckpointError(f"{where} has a chunk at {list(box.offsets)} that is beyond its shape {list(shape)}")
    if sum(box.numel for box in boxes) != math.prod(shape):
        raise CheckpointError(f"{where}: its chunks do not have as many elements as its shape {list(shape)}")
    if len({box.offsets for box in boxes}) < len(boxes):
        raise CheckpointError(f"{where} has two chunks that begin at the same element")
    if _some_overlap(shape, [box for box in boxes if box.numel > 0], where):
        raise CheckpointError(f"{where} has chunks that overlap")


def _some_overlap(shape: Sequence[int], boxes: Sequence[Box], where: str) -> bool:
    """Whether boxes with as many elements as the shape, all within it, are something else than all of it."""
    cut = [dim for dim, size in enumerate(shape) if any(box.sizes[dim] < size for box in boxes)]
    if len(boxes) <= min(1 << len(cut), _MOST_COMPARISONS):
        return any(_overlap(one, other) for one, other in itertools.combinations(boxes, 2))
    if 1 << len(cut) > _MOST_COMPARISONS:
        raise CheckpointError(f"{where} has {len(boxes)} chunks, cut in {len(cut)} dimensions")
    # Each element is in one box exactly if the mixed differences of "in how many boxes is it?" are those of the whole:
    # at the corners of the boxes, with signs, what touches cancels. So it takes one pass over many chunks.
    corners: Counter[tuple[int, ...]] = Counter()
    for box in boxes:
        ends = [((box.offsets[dim], 1), (box.offsets[dim] + box.sizes[dim], -1)) for dim in cut]
        for corner in itertools.product(*ends):
            corners[tuple(place for place, _ in corner)] += math.prod(sign for _, sign in corner)
    whole = itertools.product(*(((0, 1), (shape[dim], -1)) for dim in cut))
    for corner in whole:
        corners[tuple(place for place, _ in corner)] -= math.prod(sign for _, sign in corner)
    return any(corners.values())


def _overlap(one: Box, other: Box) -> bool:
    return all(
        max(start, other_start) < min(start + size, other_start + other_size)
        for start, size, other_start, other_size in zip(*one, *other, strict=True)
    )

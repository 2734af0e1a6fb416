"""Storage for ``torch.distributed.checkpoint``: metadata in JSON, tensors in safetensors files, no pickle.

A name of a tensor says which kind of file it goes into: what stands before its first dot.
"""

from __future__ import annotations

import contextlib
import math
import os
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
from longshore.checkpoint.parts import names_of
from longshore.checkpoint.reading import checked, read_json
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

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)
        self._metadata = None

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

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert self._metadata is not None
        with contextlib.ExitStack() as stack:
            files: dict[str, Any] = {}
            for item in plan.items:
                where: Location = self._metadata.storage_data[item.storage_index]
                if where.file not in files:
                    files[where.file] = stack.enter_context(opened(self.path / where.file))
                values = self._read(files[where.file], where, item)
                target = planner.resolve_tensor(item).detach()
                target.copy_(values)
                planner.commit_tensor(item, target)
        return _done(None)

    def _read(self, file: Any, where: Location, item: ReadItem) -> torch.Tensor:
        assert self._metadata is not None
        about = names_of(self._metadata)[item.storage_index.fqn]
        chunk = next(each for each in about.chunks if each.offsets == item.storage_index.offset)
        if where.tensor not in file.keys():  # noqa: SIM118 - no mapping
            raise CheckpointError(f"{self.path / where.file} has no {where.tensor}, which {METADATA} names")
        found = file.get_slice(where.tensor)
        shape, dtype = tuple(found.get_shape()), DTYPES.get(found.get_dtype())
        if (shape, dtype) != (tuple(chunk.sizes), about.properties.dtype):
            raise CheckpointError(
                f"{self.path / where.file}: {where.tensor} is {found.get_dtype()} {list(shape)}, and {METADATA} says "
                "otherwise"
            )
        if tuple(item.lengths) == shape:
            return file.get_tensor(where.tensor)
        ends = zip(item.storage_offsets, item.lengths, strict=True)
        return found[tuple(slice(start, start + length) for start, length in ends)]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Path(checkpoint_id) / METADATA).is_file()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file, mapped. Raises CheckpointError where it is none."""
    from safetensors import SafetensorError, safe_open

    try:
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
            if "/" in file or "\\" in file or "\0" in file or file in ("", ".", ".."):
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
    if not shape or len(boxes) < 2:
        return
    full = [box for box in boxes if box.numel > 0]
    sweep = max(range(len(shape)), key=lambda dim: len({box.offsets[dim] for box in full}))
    full.sort(key=lambda box: box.offsets[sweep])
    open_boxes: list[Box] = []
    for box in full:
        open_boxes = [each for each in open_boxes if each.offsets[sweep] + each.sizes[sweep] > box.offsets[sweep]]
        if any(_overlap(box, each) for each in open_boxes):
            raise CheckpointError(f"{where} has chunks that overlap, at {list(box.offsets)}")
        open_boxes.append(box)


def _overlap(one: Box, other: Box) -> bool:
    return all(
        max(start, other_start) < min(start + size, other_start + other_size)
        for start, size, other_start, other_size in zip(*one, *other, strict=True)
    )

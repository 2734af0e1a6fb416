"""Writes safetensors files one tensor at a time, with their checksum."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longshore.errors import CheckpointError

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names in the format."""
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

_CHUNK_BYTES = 1 << 24
"""Bytes written and hashed at a time, so that hashing finds them in the cache."""
_BEHIND_BYTES = 1 << 26
"""Bytes by which the checksum may be behind the file."""


class TensorHead(NamedTuple):
    """A tensor's entry in a file's header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WrittenFile(NamedTuple):
    """A file's entry in the manifest."""

    name: str
    num_bytes: int
    sha256: str


def dtype_name(dtype: torch.dtype, of: str) -> str:
    """The format's name of a dtype. Raises CheckpointError if it has none."""
    name = DTYPE_NAMES.get(dtype)
    if name is None:
        raise CheckpointError(f"{of} is {dtype}, and safetensors files have {', '.join(DTYPE_NAMES.values())}")
    return name


class _Hasher:
    """SHA-256 on a separate thread. (An executor accepts no more work once the main thread has ended.)"""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._changed = threading.Condition()
        self._chunks: list[memoryview] = []
        self._behind = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="longshore-sha256", daemon=True)
        self._thread.start()

    def add(self, content: memoryview) -> None:
        """Hash ``content``, which must not change until :meth:`catch_up` or :meth:`close`."""
        with self._changed:
            self._chunks += [content[start : start + _CHUNK_BYTES] for start in range(0, len(content), _CHUNK_BYTES)]
            self._behind += len(content)
            self._changed.notify_all()

    def catch_up(self, most_bytes: int) -> None:
        """Wait until at most that many bytes are left."""
        with self._changed:
            self._changed.wait_for(lambda: self._behind <= most_bytes)

    def hexdigest(self) -> str:
        self.catch_up(0)
        return self._hash.hexdigest()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._chunks or self._closed)
                if self._closed:
                    return
                chunk = self._chunks.pop(0)
            self._hash.update(chunk)
            with self._changed:
                self._behind -= len(chunk)
                del chunk
                self._changed.notify_all()


class TensorFile:
    """A file that is written one tensor at a time, each of which can be freed once it is written.

    Use it in ``with``; after an exception the file stays as far as it was written.

    Args:
        path: must not exist.
        heads: all tensors. They are written in the order of :attr:`heads`: larger elements first, so that each is
            aligned to its element's size.
        about: the header's ``__metadata__``, which some readers require; None: no such entry.

    Raises:
        CheckpointError: a dtype that the format does not have, by name.
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, heads: Iterable[TensorHead], about: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.heads: Sequence[TensorHead] = sorted(heads, key=lambda head: -head.dtype.itemsize)
        header, end = {}, 0
        for head in self.heads:
            header[head.name] = {
                "dtype": dtype_name(head.dtype, head.name),
                "shape": list(head.shape),
                "data_offsets": [end, end + head.num_bytes],
            }
            end += head.num_bytes
        assert len(header) == len(self.heads)
        if about is not None:
            header = {"__metadata__": dict(about), **header}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._next = 0
        self._num_bytes = 0
        # Unbuffered: writes are large.
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed in __exit__
        self._hasher = _Hasher()
        try:
            self._write(memoryview(len(text).to_bytes(8, "little") + text))
        except BaseException:
            self._close()
            raise

    def write(self, tensor: Tensor) -> None:
        """Write the next one of :attr:`heads`, from any device."""
        head = self.heads[self._next]
        assert tensor.dtype == head.dtype and tuple(tensor.shape) == head.shape, (head, tensor.dtype, tensor.shape)
        self._next += 1
        if head.num_bytes > 0:
            values = tensor.detach().cpu().contiguous().reshape(-1)
            content: Any = values.view(torch.uint8).numpy()
            self._write(memoryview(content))

    def _write(self, content: memoryview) -> None:
        # Hashed while these bytes and the next ones are written; both release the GIL.
        self._num_bytes += len(content)
        self._hasher.add(content)
        most = (
            _BEHIND_BYTES if len(content) <= _BEHIND_BYTES else 0
        )  # do not keep a large tensor together with the next
        while content:
            content = content[self._file.write(content[:_CHUNK_BYTES]) or 0 :]
        self._hasher.catch_up(most)

    def finish(self) -> WrittenFile:
        """Sync the file to the disk, and return its entry for the manifest."""
        assert self._next == len(self.heads)
        os.fsync(self._file.fileno())
        return WrittenFile(self.path.name, self._num_bytes, self._hasher.hexdigest())

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        self._hasher.close()
        self._file.close()


def write_json(path: Path, content: object) -> WrittenFile:
    """Write a new file with ``content``, and sync it to the disk. Raises OSError."""
    text = (json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n").encode()
    with open(path, "xb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(path.name, len(text), hashlib.sha256(text).hexdigest())

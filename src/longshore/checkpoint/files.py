"""Read untrusted files, and write JSON and safetensors files with their checksums."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import queue
import secrets
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from longshore.errors import CheckpointError

T = TypeVar("T")

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
"""Names of dtypes in the safetensors format."""
SAVED_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

_MOST_JSON_BYTES = 1 << 31
"""Largest JSON file. A larger file is sparse, and would fill the memory before parsing shows that it is not JSON."""
_MOST_DIGITS = 1000
"""Digits of the largest integer that is read. Python reads 4300, and what it says of others is for programmers."""
_CHUNK_BYTES = 1 << 24
"""Bytes written and hashed at a time, so that hashing finds them in the cache."""
_BLOCK_BYTES = 1 << 12
"""Bytes of which a checksum has one number."""
_BEHIND_BYTES = 1 << 26
"""Bytes that may be written before they are hashed."""


class WrittenFile(NamedTuple):
    """A file's entry in the manifest."""

    name: str
    num_bytes: int
    sha256: str


def open_regular(path: Path, writable: bool = False) -> io.FileIO:
    """Open an existing file, unbuffered.

    Raises:
        CheckpointError: the path is not a regular file.
        OSError: the file cannot be opened.
    """
    # Opening a pipe would block, and reading a device would never end.
    handle = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        return io.FileIO(handle, "r+" if writable else "r")
    except BaseException:
        os.close(handle)
        raise


def is_file_name(name: str) -> bool:
    """Return whether ``name`` can be a file's name in a folder: not a path, and accepted by the operating system."""
    if not name or name in (".", "..") or any(letter in "/\\\0" for letter in name):
        return False
    try:
        return len(os.fsencode(name)) <= 255
    except UnicodeEncodeError:
        return False


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises CheckpointError if it is not a regular file, or not JSON."""
    try:
        with open_regular(path) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes > _MOST_JSON_BYTES:
                raise CheckpointError(f"{path} has {num_bytes} bytes, which no such file has: it is damaged")
            text = file.read()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except MemoryError as error:
        raise CheckpointError(f"{path} is larger than this process's memory") from error
    try:
        return json.loads(
            text.decode(), object_pairs_hook=_object, parse_int=_integer, parse_float=_finite, parse_constant=_finite
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON ({error})") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises for repeated names: some readers would take the first, and others the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has two entries of one name")
    return found


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"{text[:20]}... is an integer of {len(text.lstrip('-'))} digits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a finite number")
    return value


def checked(value: Any, kind: type[T], where: str) -> T:
    """Return ``value`` if it is of ``kind``. Booleans are not numbers, and numbers of a checkpoint are not negative.

    Raises:
        CheckpointError: it is of another kind; ``where`` names it.
    """
    if not isinstance(value, kind) or (
        isinstance(value, int) and (isinstance(value, bool) or not 0 <= value < 1 << 63)
    ):
        words = {dict: "an object", list: "a list", str: "text", int: "a number that is not negative"}
        raise CheckpointError(f"{where} is not {words.get(kind, kind.__name__)}")
    return value  # pyright: ignore[reportReturnType]


def checked_entry(content: Any, key: str, kind: type[T], where: str) -> T:
    """Return an entry of an object, which has to be of ``kind``.

    Raises:
        CheckpointError: as :func:`checked`, also if ``content`` is not an object; ``where`` names the object.
    """
    return checked(checked(content, dict, where).get(key), kind, f"{where}: {key}")


def identity_of(found: os.stat_result) -> tuple[int, ...]:
    """Return numbers that change when a file is replaced or written; the last, also when it is renamed or linked to."""
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal. Raises CheckpointError if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open_regular(path) as file:
            buffer = memoryview(bytearray(_CHUNK_BYTES))
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def checksum(tensor: Tensor) -> str:
    """Return a checksum of a tensor's bytes, on any device, at the speed of its memory."""
    content = tensor.detach().reshape(-1).contiguous()
    if content.storage_offset() * content.element_size() % 8:
        content = content.clone()  # so that it can be read as int64
    content = content.view(torch.uint8)
    whole = content.numel() // _BLOCK_BYTES * _BLOCK_BYTES
    digest = hashlib.sha256(content[whole:].cpu().numpy().tobytes())
    for chunk in content[:whole].view(torch.int64).split(_CHUNK_BYTES // 8):
        # Weighted, so that the order counts; the shift is for values that differ in their sign only.
        weights = torch.arange(1, _BLOCK_BYTES // 8 + 1, device=chunk.device) * 0x1E3779B97F4A7C15
        digest.update(((chunk ^ (chunk >> 31)).view(-1, _BLOCK_BYTES // 8) * weights).sum(1).cpu().numpy().tobytes())
    return digest.hexdigest()


def write_json(path: Path, content: object) -> WrittenFile:
    """Write a new file with ``content``, and sync it to the disk. Raises OSError."""
    text = (json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n").encode()
    with open(path, "xb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(path.name, len(text), hashlib.sha256(text).hexdigest())


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically, with its own name last: a link of that name is replaced, and not followed.

    Raises:
        OSError: the disk failed; a former file of that name is still there. Or it is none, but a device, say.
    """
    if path.exists() and not path.is_symlink() and not path.is_file():
        raise FileExistsError(f"{path} exists, is no regular file, and is not replaced: give another name")
    beside = path.with_name(f".{secrets.token_hex(8)}.writing")
    try:
        with open(beside, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Sync the directory entries of a folder to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- safetensors --------------------------------------------------------------


class TensorHead(NamedTuple):
    """A tensor's entry in a file's header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def dtype_name(dtype: torch.dtype, of: str) -> str:
    """Return the format's name of a dtype. Raises CheckpointError if the format does not have the dtype."""
    name = DTYPE_NAMES.get(dtype)
    if name is None:
        raise CheckpointError(f"{of} is {dtype}, and safetensors files have {', '.join(DTYPE_NAMES.values())}")
    return name


class TensorFile:
    """A file that is written one tensor at a time, each of which can be freed once it is written.

    Use it as a context manager. After an exception, the incomplete file is left behind.

    Args:
        path: the new file, which must not exist.
        heads: entries of all tensors. They are written in the order of :attr:`heads`: larger elements first, so that
            each tensor is aligned to its element's size.
        about: the header's ``__metadata__``, which some readers require; None: no such entry.

    Raises:
        CheckpointError: the format does not have the dtype of a tensor, which the message names.
        OSError: the file cannot be created.
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
        self._next = self._num_bytes = self._unhashed_bytes = 0
        self._hash = hashlib.sha256()
        # Unbuffered, since writes are large.
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed in __exit__
        # A plain thread, since an executor accepts no more work once the main thread has ended.
        self._chunks: queue.Queue[memoryview | None] = queue.Queue()
        self._hasher = threading.Thread(target=self._hash_chunks, name="longshore-sha256", daemon=True)
        self._hasher.start()
        try:
            self._write(memoryview(len(text).to_bytes(8, "little") + text))
        except BaseException:
            self.__exit__()
            raise

    def write(self, tensor: Tensor) -> None:
        """Write the values of the next tensor in :attr:`heads`, from any device and in any shape."""
        head = self.heads[self._next]
        assert tensor.dtype == head.dtype and tensor.nbytes == head.num_bytes, (head, tensor.dtype, tensor.shape)
        self._next += 1
        if head.num_bytes > 0:
            values = tensor.detach().cpu().contiguous().reshape(-1)
            content: Any = values.view(torch.uint8).numpy()
            self._write(memoryview(content))

    def _write(self, content: memoryview) -> None:
        # The thread hashes these bytes while they and the next ones are written; both release the GIL.
        for start in range(0, len(content), _CHUNK_BYTES):
            self._chunks.put(content[start : start + _CHUNK_BYTES])
        self._num_bytes += len(content)
        self._unhashed_bytes += len(content)
        while content:
            content = content[self._file.write(content[:_CHUNK_BYTES]) or 0 :]
        if self._unhashed_bytes > _BEHIND_BYTES:  # a large tensor must not be in memory together with the next one
            self._chunks.join()
            self._unhashed_bytes = 0

    def _hash_chunks(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            self._hash.update(chunk)
            del chunk  # before the next get(), which may wait
            self._chunks.task_done()

    def finish(self) -> WrittenFile:
        """Sync the file to the disk, and return its entry for the manifest."""
        assert self._next == len(self.heads)
        os.fsync(self._file.fileno())
        self._chunks.join()
        return WrittenFile(self.path.name, self._num_bytes, self._hash.hexdigest())

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._chunks.put(None)
        self._hasher.join()
        self._file.close()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[Any, frozenset[str]]]:
    """Map a safetensors file; yield it and the names of its tensors. Raises CheckpointError for another file, and if
    the process may not map it."""
    from safetensors import SafetensorError, safe_open

    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        try:
            file = safe_open(path, framework="pt")
        except (MemoryError, RuntimeError) as error:  # of safetensors, and of torch, which maps it as well
            raise CheckpointError(
                f"{path} of {os.lstat(path).st_size} bytes does not fit into the memory that this process may have "
                f"({error}): raise its limit (ulimit -v), and load again; the file is not damaged"
            ) from error
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    with file:
        try:
            yield file, frozenset(file.keys())
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error

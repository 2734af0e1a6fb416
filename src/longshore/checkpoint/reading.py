"""Reads untrusted files."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import stat
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from longshore.errors import CheckpointError

T = TypeVar("T")

_CHUNK_BYTES = 1 << 22
_MOST_JSON_BYTES = 1 << 31
"""A larger file has holes: it would fill the memory before it turned out not to be JSON."""


def open_regular(path: Path, writable: bool = False) -> io.FileIO:
    """Open an existing file, unbuffered.

    Raises:
        CheckpointError: it is not a regular file.
        OSError: it cannot be opened.
    """
    # Opening a pipe would block, and a device never ends.
    handle = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        return io.FileIO(handle, "r+" if writable else "r")
    except BaseException:
        os.close(handle)
        raise


def is_file_name(name: str) -> bool:
    """Whether it is the name of a file in a folder: not a path, and accepted by the operating system."""
    if not name or name in (".", "..") or any(letter in "/\\\0" for letter in name):
        return False
    try:
        return len(os.fsencode(name)) <= 255
    except UnicodeEncodeError:
        return False


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises CheckpointError if it is not a regular file, or not JSON."""
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
        return json.loads(text.decode(), object_pairs_hook=_object, parse_float=_finite, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON ({error})") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object without repeated names: some readers would take the first, and others the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has two entries of one name")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is out of the range of a float")
    return value


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number in JSON")


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


def digest_of(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal. Raises CheckpointError if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open_regular(path) as file:
            buffer = memoryview(bytearray(_CHUNK_BYTES))
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()

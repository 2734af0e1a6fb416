"""Reading files that anybody may have written."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any, TypeVar

from longshore.errors import CheckpointError

T = TypeVar("T")

_CHUNK_BYTES = 1 << 22


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        CheckpointError: no regular file, or no JSON.
    """
    try:
        # A pipe would be waited for, and a device never ends.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CheckpointError(f"{path} is no regular file")
            text = file.read()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is no JSON ({error})") from error


def checked(value: Any, kind: type[T], where: str) -> T:
    """``value`` as what it has to be; true and false are no numbers, and numbers of a checkpoint are not negative.

    Raises:
        CheckpointError: it is something else; ``where`` names it.
    """
    if not isinstance(value, kind) or (
        isinstance(value, int) and (isinstance(value, bool) or not 0 <= value < 1 << 63)
    ):
        words = {dict: "an object", list: "a list", str: "text", int: "a number that is not negative"}
        raise CheckpointError(f"{where} is not {words.get(kind, kind.__name__)}")
    return value  # pyright: ignore[reportReturnType]


def digest_of(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal. Raises CheckpointError where it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            buffer = memoryview(bytearray(_CHUNK_BYTES))
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()

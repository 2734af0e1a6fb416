"""Plain text from files and folders: UTF-8, in an order that depends only on the names."""

from __future__ import annotations

import codecs
import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from longshore.cli.failure import CommandError, os_reason

_CHUNK_BYTES = 1 << 20
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests"}


@dataclass(frozen=True)
class Text:
    """``documents``: one UTF-8 text a file, none empty. ``skipped``: files in folders that are not text."""

    documents: list[bytes]
    skipped: int
    source: str

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.documents))


class _NotText(Exception):
    """Why a file's bytes are not text."""


def read_text(paths: tuple[Path, ...], max_bytes: int | None) -> Text:
    """Reads ``paths``, in the order given and folders sorted by name, until ``max_bytes`` bytes are there.

    A file that is named must be UTF-8 text; a folder may hold other files too, which are counted and left
    out, as are hidden ones. Without ``paths``: the Python sources of the standard library, without its tests.
    """
    documents: list[bytes] = []
    skipped = 0
    left = max_bytes
    for path, named in _files(paths) if paths else ((path, False) for path in _standard_library()):
        if left == 0:
            break
        try:
            document, num_read = _read_document(path, left)
        except _NotText as error:
            if named:
                raise CommandError(f"--data {path} is not UTF-8 text ({error}): give plain text files") from error
            skipped += 1
            continue
        if document:
            documents.append(document)
        left = None if left is None else left - num_read
    source = ", ".join(str(path) for path in paths) or "Python's standard library"
    if not documents:
        raise CommandError(f"there is no text in {source}: give files or folders of plain text with --data")
    return Text(documents, skipped, source)


def _files(paths: tuple[Path, ...]) -> Iterator[tuple[Path, bool]]:
    """Every file to read, and whether the user named it (rather than a folder that it is in)."""
    for path in paths:
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise CommandError(f"cannot read --data {path}: {os_reason(error)}") from error
        if stat.S_ISDIR(mode):
            yield from ((file, False) for file in _walk(path))
        elif stat.S_ISREG(mode):
            yield path, True
        else:
            raise CommandError(f"--data {path} is neither a file nor a folder")


def _walk(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise CommandError(f"cannot read the folder {error.filename}: {os_reason(error)}") from error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _standard_library() -> Iterator[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in _walk(root) if root.is_dir() else ():
        if path.suffix == ".py" and _NOT_LIBRARY.isdisjoint(path.relative_to(root).parts):
            yield path


def _read_document(path: Path, max_bytes: int | None) -> tuple[bytes, int]:
    """The file's text, or the whole characters in its first ``max_bytes`` bytes; and how many bytes were read."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    chunks: list[bytes] = []
    left = max_bytes
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES if left is None else min(_CHUNK_BYTES, left)):
                _check_text(decoder, chunk)
                chunks.append(chunk)
                left = None if left is None else left - len(chunk)
    except OSError as error:
        raise CommandError(f"cannot read --data {path}: {os_reason(error)}") from error
    unfinished, _ = decoder.getstate()
    if unfinished and left != 0:
        raise _NotText("it ends within a character")
    document = b"".join(chunks)
    return document[: len(document) - len(unfinished)], len(document)


def _check_text(decoder: codecs.IncrementalDecoder, chunk: bytes) -> None:
    if b"\0" in chunk:
        raise _NotText("it holds NUL bytes")
    try:
        decoder.decode(chunk)
    except UnicodeDecodeError as error:
        raise _NotText(f"byte 0x{error.object[error.start]:02x} is not UTF-8") from error

"""The training data: text of files, its tokens, and sequences of tokens. Its order depends only on names and seed."""

from __future__ import annotations

import codecs
import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from longshore.cli.settings import mode_of_data
from longshore.cli.terminal import CommandError, os_reason

END_OF_DOCUMENT = 0
"""The byte after each document. Text has no NUL byte, so it needs no token of its own."""

_READ_BYTES = 1 << 20
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests"}
_VALIDATION_SHARE = 20
"""One sequence in this many is for validation."""


@dataclass(frozen=True)
class TextDocuments:
    """The UTF-8 text of each file, none empty, and the number of ``skipped`` files in folders, which are not text."""

    documents: list[bytes]
    skipped: int
    source: str


class _NotText(Exception):
    """A file's bytes are not text; the message says why."""


def read_text(paths: tuple[Path, ...], max_bytes: int | None) -> TextDocuments:
    """Read ``paths``, in the order given and folders sorted by name, until ``max_bytes`` bytes are read.

    A file that is named must be UTF-8 text. In a folder, files that are not text are counted and skipped, and hidden
    files are ignored. Without ``paths``, the Python sources of the standard library are read, without its tests.
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
    return TextDocuments(documents, skipped, source)


def _files(paths: tuple[Path, ...]) -> Iterator[tuple[Path, bool]]:
    """Yield every file to read, and whether the user named it rather than its folder."""
    for path in paths:
        mode = mode_of_data(path)
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
    """Return the text of a file, or the whole characters in its first ``max_bytes`` bytes, and the bytes read."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    document = bytearray()
    left = max_bytes
    try:
        with path.open("rb") as file:
            while read := file.read(_READ_BYTES if left is None else min(_READ_BYTES, left)):
                if b"\0" in read:
                    raise _NotText("it has NUL bytes")
                decoder.decode(read)
                document += read
                left = None if left is None else left - len(read)
    except UnicodeDecodeError as error:
        raise _NotText(f"byte 0x{error.object[error.start]:02x} is not UTF-8") from error
    except OSError as error:
        raise CommandError(f"cannot read --data {path}: {os_reason(error)}") from error
    unfinished, _ = decoder.getstate()
    if unfinished and left != 0:
        raise _NotText("it ends within a character")
    return bytes(document[: len(document) - len(unfinished)]), len(document)


class TokenBatch(NamedTuple):
    """A batch. ``inputs`` and ``targets`` are int64, (sequences, seq_len); targets are inputs one token later."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Corpus:
    """Training data. ``tokens`` is a tensor of one dimension, uint8 or int32."""

    tokens: Tensor
    vocabulary: int

    def digest(self) -> str:
        """Return a hash of the tokens."""
        return hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()


def byte_corpus(documents: list[bytes], vocabulary: int) -> Corpus:
    """Return a corpus in which each byte is a token and documents end with ``END_OF_DOCUMENT``."""
    joined = bytearray()
    for document in documents:
        joined += document
        joined.append(END_OF_DOCUMENT)
    return Corpus(torch.frombuffer(joined, dtype=torch.uint8), vocabulary)


class Sequences:
    """A corpus as sequences of ``seq_len`` predictions. Neighbouring sequences share one token.

    Every 20th sequence (or the last, if there are fewer) is for validation. Training draws all others once in a
    random order, then again in another order, and so on.
    """

    def __init__(self, corpus: Corpus, seq_len: int, seed: int) -> None:
        count = (corpus.tokens.numel() - 1) // seq_len
        if count < 2:
            raise CommandError(
                f"the text has {corpus.tokens.numel()} tokens, but one sequence to train on and one to validate on "
                f"take {2 * seq_len + 1}: give more --data or a smaller --seq-len"
            )
        self.seq_len = seq_len
        self._tokens = corpus.tokens
        self._seed = seed
        share = min(_VALIDATION_SHARE, count)
        is_validation = torch.arange(count) % share == share - 1
        self.validation = is_validation.nonzero().flatten()
        self.training = (~is_validation).nonzero().flatten()
        self._epoch = -1
        self._order = self.training

    def training_batch(self, index: int, size: int) -> TokenBatch:
        """Return batch ``index`` of ``size`` sequences. It does not depend on the batches that were returned before."""
        return self._gather(torch.stack([self._drawn(index * size + row) for row in range(size)]))

    def validation_batches(self, count: int, size: int) -> list[TokenBatch]:
        """Return the first ``count`` batches of ``size`` validation sequences, or as many as there are."""
        return [self._gather(rows) for rows in self.validation[: count * size].split(size)]

    def _drawn(self, sample: int) -> Tensor:
        epoch, position = divmod(sample, self.training.numel())
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((self._seed + 0x9E3779B97F4A7C15 * (epoch + 1)) % 2**63)
            self._order = self.training[torch.randperm(self.training.numel(), generator=generator)]
            self._epoch = epoch
        return self._order[position]

    def _gather(self, rows: Tensor) -> TokenBatch:
        offsets = rows[:, None] * self.seq_len + torch.arange(self.seq_len + 1)
        tokens = self._tokens[offsets].long()
        return TokenBatch(tokens[:, :-1], tokens[:, 1:])

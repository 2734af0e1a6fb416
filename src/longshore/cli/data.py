"""Tokens, cut into sequences, some kept for validation; which batch comes when depends only on the seed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longshore.cli.failure import CommandError

END_OF_DOCUMENT = 0
"""The byte after each document. Text holds no NUL byte, so it needs no token of its own."""

_VALIDATION_SHARE = 20  # one sequence in so many


class Batch(NamedTuple):
    """``inputs`` and ``targets``: int64, (sequences, seq_len); the targets are the inputs one token later."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Corpus:
    """``tokens``: one dimension, uint8 or int32."""

    tokens: Tensor
    vocabulary: int

    def digest(self) -> str:
        """Equal for equal tokens."""
        return hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()


def byte_corpus(documents: list[bytes], vocabulary: int) -> Corpus:
    """Each byte is a token; documents end with ``END_OF_DOCUMENT``."""
    joined = bytearray()
    for document in documents:
        joined += document
        joined.append(END_OF_DOCUMENT)
    return Corpus(torch.frombuffer(joined, dtype=torch.uint8), vocabulary)


class Sequences:
    """A corpus as sequences of ``seq_len`` predictions that do not overlap (but for the token between two).

    Every 20th sequence (or the last, where there are fewer) is for validation.
    Training draws all others once in a random order, then again in another order, and so on.
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

    def training_batch(self, index: int, size: int) -> Batch:
        """Batch ``index`` of ``size`` sequences. Says the same whenever it is asked."""
        return self._gather(torch.stack([self._drawn(index * size + row) for row in range(size)]))

    def validation_batches(self, count: int, size: int) -> list[Batch]:
        """The first ``count`` batches of ``size`` validation sequences, or as many as there are."""
        return [self._gather(rows) for rows in self.validation[: count * size].split(size)]

    def _drawn(self, sample: int) -> Tensor:
        epoch, position = divmod(sample, self.training.numel())
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((self._seed + 0x9E3779B97F4A7C15 * (epoch + 1)) % 2**63)
            self._order = self.training[torch.randperm(self.training.numel(), generator=generator)]
            self._epoch = epoch
        return self._order[position]

    def _gather(self, rows: Tensor) -> Batch:
        offsets = rows[:, None] * self.seq_len + torch.arange(self.seq_len + 1)
        tokens = self._tokens[offsets].long()
        return Batch(tokens[:, :-1], tokens[:, 1:])

"""The buckets of one optimizer as they grow, and what this rank owns of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from longshore.sharding.bucket import Bucket, Piece
from longshore.sharding.ownership import Ownership


class Shards:
    """Parameters by index -> buckets and pieces.

    Args:
        ownership: which pieces are this rank's.
        bucket_numel: elements a bucket.
    """

    def __init__(self, ownership: Ownership, bucket_numel: int) -> None:
        self.ownership = ownership
        self._bucket_numel = bucket_numel
        # Grow with parameters.
        self.dtypes: dict[int, torch.dtype] = {}
        """Of all parameters, in the order in which they were added."""
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._owned: dict[int, list[Piece]] = {}
        self._next_piece = 0

    def add(self, parameters: Iterable[tuple[int, int, torch.dtype]]) -> list[tuple[int, int, torch.dtype]]:
        """Lay out ``(index, numel, dtype)``; returns this rank's new pieces in the same form and order."""
        entries = list(parameters)
        added = self.ownership.plan(entries, self._bucket_numel, len(self.buckets), self._next_piece)
        for parameter, _, dtype in entries:
            self.dtypes[parameter] = dtype
            self._owned[parameter] = []
        pieces = []
        for bucket in added:
            self._next_piece += sum(map(len, bucket.pieces))
            self._bucket_of.update((member.parameter, bucket) for member in bucket.members)
            for piece in self.ownership.owned(bucket):
                self._owned[piece.parameter].append(piece)
                pieces.append((piece.index, piece.numel, self.dtypes[piece.parameter]))
        self.buckets += added
        return pieces[::-1]  # buckets were filled from the last parameter on

    def bucket_of(self, parameter: int) -> Bucket | None:
        """None for a parameter without elements."""
        return self._bucket_of.get(parameter)

    def dtype_of(self, bucket: Bucket) -> torch.dtype:
        return self.dtypes[bucket.members[0].parameter]

    def owned(self, parameter: int) -> Sequence[Piece]:
        """What this rank steps of the parameter."""
        return self._owned.get(parameter, ())

    def owners(self, parameter: int) -> tuple[tuple[int, int], ...]:
        """Which ranks step how many of the parameter's elements."""
        bucket = self._bucket_of.get(parameter)
        counts = [] if bucket is None else self.ownership.counts(bucket, parameter)
        return tuple((rank, count) for rank, count in enumerate(counts) if count)

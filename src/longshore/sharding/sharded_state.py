"""Reading and writing optimizer state that is spread over ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longshore.host import HostStore, OwnedRun, ParameterStore
from longshore.layout import Slab
from longshore.sharding.bucket import Piece
from longshore.sharding.shards import Shards


class ShardedState(ParameterStore):
    """What of a sharded store knows nothing of windows.

    Args:
        inner: holds the pieces that this rank owns, by the index of the piece.
        shards: which pieces these are.
    """

    def __init__(self, inner: HostStore, shards: Shards) -> None:
        self.inner = self.local = inner
        self.shards = shards
        self._ownership = shards.ownership

    @abstractmethod
    def _before_writing(self) -> None:
        """What is under way, and reads state, is done."""

    # -- this rank's part -----------------------------------------------------

    def owned(self, parameter: int, numel: int) -> Sequence[OwnedRun]:
        bucket = self.shards.bucket_of(parameter)
        return [
            OwnedRun(piece.index, piece.parameter_offset, piece.numel, self._ownership.tells_of(bucket, piece))
            for piece in self.shards.owned(parameter)
            if bucket is not None
        ]

    def slab_of(self, parameter: int) -> Slab | None:
        return self._ownership.slab_of(parameter)

    # -- all of it --------------------------------------------------------------

    def adopt(self, parameter: int, values: Tensor, *, keep_matching: bool) -> None:
        self._before_writing()
        for piece in self.shards.owned(parameter):
            self.inner.adopt(piece.index, values[self._ownership.place(piece)], keep_matching=keep_matching)

    def count_differing(self, parameter: int, values: Tensor) -> int:
        owned = self.shards.owned(parameter)
        return sum(self.inner.count_differing(piece.index, values[self._ownership.place(piece)]) for piece in owned)

    def _split(self, parameter: int, values: Tensor) -> list[tuple[Piece, Tensor]]:
        values = self._ownership.part(parameter, values)
        return [
            (piece, values[piece.parameter_offset : piece.parameter_offset + piece.numel])
            for piece in self.shards.owned(parameter)
        ]

    def read_state(self, parameter: int, which: str) -> Tensor:
        """A copy of the whole array, from all ranks; every rank has to ask."""
        self.check_usable()
        return self._assemble(parameter, lambda piece: self.inner.read_state(piece, which))

    def read_values(self, parameter: int, held: Tensor) -> Tensor:
        if self._ownership.replicates:
            return held
        places = {piece.index: self._ownership.place(piece) for piece in self.shards.owned(parameter)}
        return self._assemble(parameter, lambda piece: held[places[piece]].float())

    def part_to_hold(self, parameter: int, values: Tensor) -> Tensor:
        return self._ownership.held(parameter, values)

    def _assemble(self, parameter: int, read: Callable[[int], Tensor]) -> Tensor:
        bucket = self.shards.bucket_of(parameter)
        if bucket is None:
            return torch.empty(0, dtype=torch.float32)
        pieces = [[piece for piece in own if piece.parameter == parameter] for own in bucket.pieces]
        return self._ownership.assemble(parameter, pieces, read)

    def write_gradient(self, parameter: int, values: Tensor) -> None:
        for piece, part in self._split(parameter, values):
            self.inner.write_gradient(piece.index, part)

    def write_state(self, parameter: int, which: str, values: Tensor) -> None:
        self._before_writing()
        for piece, part in self._split(parameter, values):
            self.inner.write_state(piece.index, which, part)

    def clear_state(self, parameter: int) -> None:
        self._before_writing()
        for piece in self.shards.owned(parameter):
            self.inner.clear_state(piece.index)

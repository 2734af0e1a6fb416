"""Who steps what: a part of every bucket (ZeRO-1 and 2), or everything (stage 0)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from longshore.sharding.bucket import Bucket, Piece
from longshore.sharding.lane import Action, CollectiveLane
from longshore.sharding.reduction import ReducedShard


class Ownership(ABC):
    """Which pieces this rank steps, and what the ranks tell each other for that."""

    def __init__(self, lane: CollectiveLane) -> None:
        self.lane = lane

    @abstractmethod
    def owned(self, bucket: Bucket) -> Sequence[Piece]:
        """The pieces that this rank steps."""

    @abstractmethod
    def counts(self, bucket: Bucket, parameter: int) -> list[int]:
        """How many elements of the parameter each rank steps."""

    @abstractmethod
    def arrivals(self, bucket: Bucket, reduced: ReducedShard) -> Iterator[tuple[Piece, Tensor]]:
        """What a round brought for the owned pieces: float32, flat. In a job of the lane."""

    @abstractmethod
    def publish(self, bucket: Bucket, targets: Mapping[int, Tensor]) -> None:
        """Complete the parameters ``targets`` (flat, by index) on every rank. In a job of the lane."""

    @abstractmethod
    def assemble(self, pieces: Sequence[Sequence[Piece]], read: Callable[[int], Tensor]) -> Tensor:
        """One parameter's state from its pieces, given by rank; ``read`` gives an owned one."""

    @abstractmethod
    def total(self, part: float) -> float:
        """The sum over all parameters, where ``part`` is the sum over the owned pieces."""


class Sharded(Ownership):
    """Each rank steps its shard of every bucket.

    Args:
        lane: the ranks.
        gather_numel: elements, over all ranks, of one gathering of parameters.
    """

    def __init__(self, lane: CollectiveLane, gather_numel: int) -> None:
        super().__init__(lane)
        self._chunk_numel = max(1, gather_numel // lane.world_size)

    def owned(self, bucket: Bucket) -> Sequence[Piece]:
        return bucket.pieces[self.lane.rank]

    def counts(self, bucket: Bucket, parameter: int) -> list[int]:
        return [sum(piece.numel for piece in own if piece.parameter == parameter) for own in bucket.pieces]

    def arrivals(self, bucket: Bucket, reduced: ReducedShard) -> Iterator[tuple[Piece, Tensor]]:
        yield from _used(self.owned(bucket), reduced)

    def publish(self, bucket: Bucket, targets: Mapping[int, Tensor]) -> None:
        example = next(iter(targets.values()))
        for start in range(0, bucket.shard_numel, self._chunk_numel):
            numel = min(self._chunk_numel, bucket.shard_numel - start)
            chunk = torch.empty(numel, dtype=example.dtype, device=example.device)
            for part, target in _parts(self.owned(bucket), targets, start, numel):
                chunk[part] = target
            received = self.lane.gather(chunk.view(torch.uint8))
            for rank, pieces in enumerate(bucket.pieces):
                if rank != self.lane.rank:
                    values = received[rank].view(example.dtype)
                    for part, target in _parts(pieces, targets, start, numel):
                        target.copy_(values[part])

    def assemble(self, pieces: Sequence[Sequence[Piece]], read: Callable[[int], Tensor]) -> Tensor:
        longest = max(piece.numel for own in pieces for piece in own)
        mine = torch.zeros(longest, dtype=torch.float32)
        for piece in pieces[self.lane.rank]:
            mine[: piece.numel] = read(piece.index)

        def collect() -> Tensor:
            self.lane.meet(Action.READ, next(piece.parameter for own in pieces for piece in own), 0)
            return self.lane.gather(mine.to(self.lane.device).view(torch.uint8)).cpu()

        received = self.lane.run(collect)
        # A parameter lies in one bucket, and each rank has at most one run of it.
        return torch.cat(
            [received[rank].view(torch.float32)[: piece.numel] for rank, own in enumerate(pieces) for piece in own]
        )

    def total(self, part: float) -> float:
        # Added in the order of the ranks, so that all of them have the same bits.
        parts = self.lane.run(lambda: self.lane.rows(torch.tensor([part], dtype=torch.float64)))
        return sum(parts.view(-1).tolist())


class Replicated(Ownership):
    """Each rank steps everything, on the same gradients."""

    def owned(self, bucket: Bucket) -> Sequence[Piece]:
        return [piece for pieces in bucket.pieces for piece in pieces]

    def counts(self, bucket: Bucket, parameter: int) -> list[int]:
        return [sum(piece.numel for piece in self.owned(bucket) if piece.parameter == parameter)] * len(bucket.pieces)

    def arrivals(self, bucket: Bucket, reduced: ReducedShard) -> Iterator[tuple[Piece, Tensor]]:
        flags = torch.zeros(max(map(len, bucket.pieces)), dtype=torch.uint8)
        flags[: len(reduced.used)] = torch.tensor(reduced.used, dtype=torch.uint8)
        used = self.lane.rows(flags).bool()
        shards = self.lane.gather(reduced.values.view(torch.uint8))
        for rank, pieces in enumerate(bucket.pieces):
            yield from _used(pieces, ReducedShard(shards[rank].view(torch.float32), used[rank].tolist()[: len(pieces)]))

    def publish(self, bucket: Bucket, targets: Mapping[int, Tensor]) -> None:
        return

    def assemble(self, pieces: Sequence[Sequence[Piece]], read: Callable[[int], Tensor]) -> Tensor:
        return torch.cat([read(piece.index) for own in pieces for piece in own])

    def total(self, part: float) -> float:
        return part


def _used(pieces: Sequence[Piece], reduced: ReducedShard) -> Iterator[tuple[Piece, Tensor]]:
    for piece, used in zip(pieces, reduced.used, strict=True):
        if used:
            yield piece, reduced.values[piece.shard_offset : piece.shard_offset + piece.numel]


def _parts(
    pieces: Sequence[Piece], targets: Mapping[int, Tensor], start: int, numel: int
) -> Iterator[tuple[slice, Tensor]]:
    """Where the pieces of ``targets`` lie in elements ``[start, start + numel)`` of a shard, and in their parameter."""
    for piece in pieces:
        first = max(piece.shard_offset, start)
        last = min(piece.shard_offset + piece.numel, start + numel)
        if piece.parameter in targets and first < last:
            offset = piece.parameter_offset + first - piece.shard_offset
            yield slice(first - start, last - start), targets[piece.parameter][offset : offset + last - first]

"""Which rank owns what: parameters -> buckets -> shards -> pieces, as frozen offsets.

Pure: no tensors, no ranks of a running job. A bucket holds parameters of one
dtype whose gradients are reduced together. It is cut into one shard for each
rank, all of the same length (the last ones end in padding), so that every rank
has an equal part of every bucket. A piece is the part of one parameter that
lies in one shard: what one rank owns of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from longshore.layout import align


@dataclass(frozen=True)
class Member:
    """One parameter's place in a bucket: elements ``[offset, offset + numel)``."""

    parameter: int
    offset: int
    numel: int


@dataclass(frozen=True)
class Piece:
    """Elements ``[parameter_offset, parameter_offset + numel)`` of one parameter, in one shard."""

    index: int
    """Counts all pieces of all buckets and all ranks, the same way on every rank."""
    parameter: int
    parameter_offset: int
    shard_offset: int
    numel: int


@dataclass(frozen=True)
class Bucket:
    """Parameters that are reduced together, and the pieces that each rank owns of them."""

    index: int
    members: tuple[Member, ...]
    shard_numel: int
    pieces: tuple[tuple[Piece, ...], ...]
    """By rank, in order of ``shard_offset``."""

    @property
    def padded_numel(self) -> int:
        return self.shard_numel * len(self.pieces)


def plan_buckets(
    parameters: Iterable[tuple[int, int, Hashable]],
    bucket_numel: int,
    world_size: int,
    first_bucket: int = 0,
    first_piece: int = 0,
) -> tuple[Bucket, ...]:
    """Fill buckets with parameters of one kind, last registered first: so backward brings their gradients.

    A parameter is never cut between buckets: one that is larger than
    ``bucket_numel`` has a bucket of its own.

    Args:
        parameters: ``(index, numel, kind)``; kinds (dtypes) are not mixed. One
            without elements is in no bucket.
        bucket_numel: elements a bucket, at least 1.
        world_size: how many ranks share each bucket.
        first_bucket: the index of the first bucket.
        first_piece: the index of the first piece.

    Raises:
        ValueError: a negative numel, or a size below 1.
    """
    if bucket_numel < 1:
        raise ValueError(f"a bucket has at least one element, not {bucket_numel}")
    if world_size < 1:
        raise ValueError(f"a bucket is shared by at least one rank, not {world_size}")
    buckets: list[Bucket] = []
    for members in fill_buckets(parameters, bucket_numel):
        bucket = _cut(first_bucket + len(buckets), members, world_size, first_piece)
        first_piece += sum(len(pieces) for pieces in bucket.pieces)
        buckets.append(bucket)
    return tuple(buckets)


def plan_shards(
    parameters: Iterable[tuple[int, int, Hashable]],
    bucket_numel: int,
    shards: Mapping[int, Sequence[tuple[int, int]]],
    first_bucket: int = 0,
    first_piece: int = 0,
) -> tuple[Bucket, ...]:
    """As :func:`plan_buckets`, where each parameter is cut already.

    Args:
        parameters: as there.
        bucket_numel: as there.
        shards: by parameter, ``(offset, numel)`` of what each rank has of it.
        first_bucket: as there.
        first_piece: as there.
    """
    buckets: list[Bucket] = []
    for filling in fill_buckets(parameters, bucket_numel):
        by_rank: list[tuple[Piece, ...]] = []
        lengths = []
        for rank in range(len(shards[filling[0][0]])):
            pieces, end = [], 0
            for parameter, _ in filling:
                offset, numel = shards[parameter][rank]
                if numel > 0:
                    pieces.append(Piece(first_piece, parameter, offset, end, numel))
                    first_piece += 1
                    end += numel
            by_rank.append(tuple(pieces))
            lengths.append(end)
        index = first_bucket + len(buckets)
        buckets.append(Bucket(index, _members(filling), align(max(lengths)), tuple(by_rank)))
    return tuple(buckets)


def fill_buckets(parameters: Iterable[tuple[int, int, Hashable]], bucket_numel: int) -> list[list[tuple[int, int]]]:
    """``(index, numel)`` of the members of each bucket; the arguments are those of :func:`plan_buckets`."""
    entries = list(parameters)
    for parameter, numel, _ in entries:
        if numel < 0:
            raise ValueError(f"parameter {parameter} has {numel} elements")
    filled: list[list[tuple[int, int]]] = []
    open_buckets: dict[Hashable, tuple[list[tuple[int, int]], int]] = {}
    for parameter, numel, kind in reversed(entries):
        if numel == 0:
            continue
        members, total = open_buckets.get(kind, ([], bucket_numel))
        if total + numel > bucket_numel:
            members, total = [], 0
            filled.append(members)
        members.append((parameter, numel))
        open_buckets[kind] = (members, total + numel)
    return filled


def _members(parameters: list[tuple[int, int]]) -> tuple[Member, ...]:
    members, end = [], 0
    for parameter, numel in parameters:
        members.append(Member(parameter, end, numel))
        end += numel
    return tuple(members)


def shard_numel_of(members: Sequence[tuple[int, int]], world_size: int) -> int:
    """Elements of each rank's shard of a bucket with these members, given as ``(index, numel)``."""
    return align(-(-sum(numel for _, numel in members) // world_size))


def shard_parts(members: Sequence[tuple[int, int]], shard_numel: int, rank: int) -> Iterator[tuple[int, int, int, int]]:
    """``(parameter, its offset in the parameter, its offset in the shard, numel)`` of what lies in a rank's shard."""
    start, stop, offset = rank * shard_numel, (rank + 1) * shard_numel, 0
    for parameter, numel in members:
        first, last = max(offset, start), min(offset + numel, stop)
        if first < last:
            yield parameter, first - offset, first - start, last - first
        offset += numel


def _cut(index: int, parameters: list[tuple[int, int]], world_size: int, next_piece: int) -> Bucket:
    shard_numel = shard_numel_of(parameters, world_size)
    shards = []
    for rank in range(world_size):
        pieces = []
        for part in shard_parts(parameters, shard_numel, rank):
            pieces.append(Piece(next_piece, *part))
            next_piece += 1
        shards.append(tuple(pieces))
    return Bucket(index, _members(parameters), shard_numel, tuple(shards))

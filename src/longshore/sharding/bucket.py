"""Which rank owns what, as frozen offsets: parameters -> buckets -> shards -> shard ranges.

This module is pure: it knows no tensors and no ranks of a running job. A bucket holds parameters of one dtype whose
gradients are reduced together. It is divided into one shard for each rank, all of the same length (the last ones end in
padding), so that every rank has an equal share of every bucket. A shard range is what one shard has of one parameter:
what one rank owns of it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from longshore.layout import align


class Member(NamedTuple):
    """A parameter in a bucket, behind those before it."""

    parameter: int
    numel: int


@dataclass(frozen=True)
class ShardRange:
    """Elements ``[parameter_offset, parameter_offset + numel)`` of one parameter, in one shard."""

    index: int
    """Counts the ranges of all buckets and all ranks, in the same way on every rank."""
    parameter: int
    parameter_offset: int
    shard_offset: int
    numel: int


@dataclass(frozen=True)
class Bucket:
    """Parameters that are reduced together, and the ranges that each rank owns of them."""

    index: int
    members: tuple[Member, ...]
    shard_numel: int
    ranges: tuple[tuple[ShardRange, ...], ...]
    """By rank, in order of ``shard_offset``."""

    @functools.cached_property
    def parameters(self) -> frozenset[int]:
        """Those of its members."""
        return frozenset(member.parameter for member in self.members)


class SliceEntry(NamedTuple):
    """What a slice has of a shard range: its elements in the slice, in the range and in the parameter."""

    owned: ShardRange
    in_slice: slice
    in_range: slice
    in_parameter: slice


def plan_buckets(
    parameters: Iterable[tuple[int, int, Hashable]],
    bucket_numel: int,
    world_size: int,
    first_bucket: int = 0,
    first_range: int = 0,
    shards: Mapping[int, Sequence[tuple[int, int]]] | None = None,
) -> tuple[Bucket, ...]:
    """Fill buckets with parameters of one kind, last registered first: in the order in which backward brings gradients.

    A parameter is never divided between buckets: one that is larger than ``bucket_numel`` has a bucket of its own.

    Args:
        parameters: ``(index, numel, kind)``; kinds (dtypes) are not mixed. A parameter without elements is in no
            bucket.
        bucket_numel: elements a bucket, at least 1.
        world_size: how many ranks share each bucket.
        first_bucket: the index of the first bucket.
        first_range: the index of the first shard range.
        shards: by parameter, ``(offset, numel)`` of what each rank has of it, where parameters are sharded already. By
            default each bucket is divided evenly.

    Raises:
        ValueError: a negative numel, or a size below 1.
    """
    if bucket_numel < 1:
        raise ValueError(f"a bucket has at least one element, not {bucket_numel}")
    if world_size < 1:
        raise ValueError(f"a bucket is shared by at least one rank, not {world_size}")
    buckets: list[Bucket] = []
    indices = itertools.count(first_range)
    for filled in fill_buckets(parameters, bucket_numel):
        shard_numel = shard_numel_of(filled, world_size)
        by_rank = [list(shard_parts(filled, shard_numel, rank)) for rank in range(world_size)]
        if shards is not None:
            by_rank = [list(_sharded_already(filled, shards, rank)) for rank in range(world_size)]
            shard_numel = align(max(sum(numel for *_, numel in own) for own in by_rank))
        ranges = tuple(tuple(ShardRange(next(indices), *each) for each in own) for own in by_rank)
        members = tuple(itertools.starmap(Member, filled))
        buckets.append(Bucket(first_bucket + len(buckets), members, shard_numel, ranges))
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


def _sharded_already(
    members: Sequence[tuple[int, int]], shards: Mapping[int, Sequence[tuple[int, int]]], rank: int
) -> Iterator[tuple[int, int, int, int]]:
    """As :func:`shard_parts`, of shards that are given."""
    end = 0
    for parameter, _ in members:
        offset, numel = shards[parameter][rank]
        if numel > 0:
            yield parameter, offset, end, numel
            end += numel


def slices(shard_numel: int, world_size: int, most: int) -> Iterator[tuple[int, int]]:
    """``(start, numel)`` of consecutive slices of a shard, of at most ``most`` elements over all ranks."""
    step = max(1, most // world_size)
    for start in range(0, shard_numel, step):
        yield start, min(step, shard_numel - start)


def slice_entries(ranges: Sequence[ShardRange], start: int, numel: int) -> list[SliceEntry]:
    """What elements ``[start, start + numel)`` of a shard have of its ranges."""
    found = []
    for owned in ranges:
        first, last = max(owned.shard_offset, start), min(owned.shard_offset + owned.numel, start + numel)
        if first < last:
            inside = slice(first - owned.shard_offset, last - owned.shard_offset)
            whole = slice(owned.parameter_offset + inside.start, owned.parameter_offset + inside.stop)
            found.append(SliceEntry(owned, slice(first - start, last - start), inside, whole))
    return found

"""Layout of parameters over ranks, as frozen numbers: buckets, shards and shard ranges, and grids of ranks.

This module is pure: it does not use the ranks of a running job. A bucket holds parameters of one dtype whose gradients
are reduced together. It is divided into one shard for each rank, all of the same length (the last ones end in padding),
so that every rank has an equal share of every bucket. A shard range is the part of one parameter in one shard.

At stage 3 a parameter is divided by tensor parallelism first, and then by FSDP2, over a grid of ranks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from longshore.layout.tiles import DimRange, align


class Member(NamedTuple):
    """A parameter in a bucket; it starts where the member before it ends."""

    parameter: int
    numel: int


@dataclass(frozen=True)
class ShardRange:
    """Elements ``[parameter_offset, parameter_offset + numel)`` of one parameter, in one shard."""

    index: int
    """Number of this range among those of all buckets and all ranks, equal on every rank."""
    parameter: int
    parameter_offset: int
    shard_offset: int
    numel: int

    @property
    def elements(self) -> slice:
        """Elements of the range, as a slice of the flat parameter."""
        return slice(self.parameter_offset, self.parameter_offset + self.numel)


@dataclass(frozen=True)
class Bucket:
    """Parameters that are reduced together, and the ranges that each rank owns of them."""

    index: int
    members: tuple[Member, ...]
    shard_numel: int
    ranges: tuple[tuple[ShardRange, ...], ...]
    """Ranges of each rank, in order of ``shard_offset``."""

    @functools.cached_property
    def parameters(self) -> frozenset[int]:
        """Indices of its members."""
        return frozenset(member.parameter for member in self.members)


def plan_buckets(
    parameters: Iterable[tuple[int, int, Hashable]],
    bucket_numel: int,
    world_size: int,
    first_bucket: int = 0,
    first_range: int = 0,
    shards: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    units: Mapping[int, int] = MappingProxyType({}),
) -> tuple[Bucket, ...]:
    """Fill buckets with parameters of one kind, last registered first: in the order in which backward brings gradients.

    A parameter is never divided between buckets: one that is larger than ``bucket_numel`` has a bucket of its own.

    Args:
        parameters: ``(index, numel, kind)``; kinds (dtypes) are not mixed. A parameter without elements is in no
            bucket.
        bucket_numel: maximal number of elements in a bucket, at least 1.
        world_size: how many ranks share each bucket.
        first_bucket: the index of the first bucket.
        first_range: the index of the first shard range.
        shards: ``(offset, numel)`` of each rank's part of each parameter, if parameters are already sharded. By default
            each bucket is divided evenly.
        units: number of elements, if it is not 1, at whose multiples a parameter may be divided. Parameters of
            different units are not mixed.

    Raises:
        ValueError: a numel is negative, or a size is below 1.
    """
    if bucket_numel < 1:
        raise ValueError(f"a bucket has at least one element, not {bucket_numel}")
    if world_size < 1:
        raise ValueError(f"a bucket is shared by at least one rank, not {world_size}")
    indices = itertools.count(first_range)
    buckets = []
    kinds = [(index, numel, (kind, units.get(index, 1))) for index, numel, kind in parameters]
    for index, filled in enumerate(fill_buckets(kinds, bucket_numel), first_bucket):
        even_numel = shard_numel_of(filled, world_size, units.get(filled[0][0], 1))
        by_rank: list[tuple[ShardRange, ...]] = []
        for rank in range(world_size):
            parts = shard_parts(filled, even_numel, rank)
            if shards is not None:
                parts = [(parameter, *shards[parameter][rank]) for parameter, _ in filled]
            ranges, end = [], 0
            for parameter, offset, numel in parts:
                if numel > 0:
                    ranges.append(ShardRange(next(indices), parameter, offset, end, numel))
                    end += numel
            by_rank.append(tuple(ranges))
        shard_numel = align(max(sum(each.numel for each in ranges) for ranges in by_rank))
        buckets.append(Bucket(index, tuple(itertools.starmap(Member, filled)), shard_numel, tuple(by_rank)))
    return tuple(buckets)


def fill_buckets(parameters: Iterable[tuple[int, int, Hashable]], bucket_numel: int) -> list[list[tuple[int, int]]]:
    """Return ``(index, numel)`` of the members of each bucket; the arguments are those of :func:`plan_buckets`."""
    filled: list[list[tuple[int, int]]] = []
    open_buckets: dict[Hashable, tuple[list[tuple[int, int]], int]] = {}
    for parameter, numel, kind in reversed(list(parameters)):
        if numel < 0:
            raise ValueError(f"parameter {parameter} has {numel} elements")
        if numel == 0:
            continue
        members, total = open_buckets.get(kind, ([], bucket_numel))
        if total + numel > bucket_numel:
            members, total = [], 0
            filled.append(members)
        members.append((parameter, numel))
        open_buckets[kind] = (members, total + numel)
    return filled


def shard_numel_of(members: Sequence[tuple[int, int]], world_size: int, unit: int = 1) -> int:
    """Return the number of elements in a rank's shard of a bucket, a multiple of ``unit``; ``members`` are given as
    ``(index, numel)``."""
    return align(-(-sum(numel for _, numel in members) // world_size), unit)


def shard_parts(members: Sequence[tuple[int, int]], shard_numel: int, rank: int) -> Iterator[tuple[int, int, int]]:
    """Yield ``(parameter, offset, numel)`` of the ranges in a rank's shard, in order."""
    start, stop, before = rank * shard_numel, (rank + 1) * shard_numel, 0
    for parameter, numel in members:
        first, last = max(before, start), min(before + numel, stop)
        if first < last:
            yield parameter, first - before, last - first
        before += numel


class GridPosition(NamedTuple):
    """Position of one rank in a grid."""

    replica: int
    shard: int
    tp_rank: int  # rank in tensor parallelism


class RankGrid:
    """Grid of ranks: replicas x shards x ranks of tensor parallelism.

    ``ranks[replica][shard][tp_rank]`` are numbered from 0 on; ``positions`` is by rank, and ``tp_size`` the number of
    ranks of tensor parallelism.

    Raises:
        ValueError: the order of ranks is not the same for every place in tensor parallelism.
    """

    def __init__(self, ranks: Sequence[Sequence[Sequence[int]]]) -> None:
        found = {
            rank: GridPosition(replica, shard, tp_rank)
            for replica, shards in enumerate(ranks)
            for shard, parallel in enumerate(shards)
            for tp_rank, rank in enumerate(parallel)
        }
        self.positions = tuple(found[rank] for rank in range(len(found)))
        self.shards, self.tp_size = len(ranks[0]), len(ranks[0][0])
        if len({tuple(self.positions[rank][:2] for rank in self.alike(place)) for place in range(self.tp_size)}) > 1:
            # Gradients are added in the order of the ranks: parameters that all of them have would get different bits.
            raise ValueError("the mesh has its ranks in another order for some of tensor parallelism's ranks")

    def alike(self, tp_rank: int) -> list[int]:
        """Return the ranks with this place in tensor parallelism, in order: their gradients are averaged."""
        return [rank for rank, position in enumerate(self.positions) if position.tp_rank == tp_rank]


@dataclass(frozen=True)
class ParameterLayout:
    """Layout of one parameter on a grid of ranks.

    Tensor parallelism divides the parameter along ``dim``, and FSDP2 divides each of these parts along the first
    dimension. Both divide like ``torch.chunk``.

    Attributes:
        shape: shape of the whole parameter.
        dim: dimension along which tensor parallelism divides the parameter; None: each of its ranks has all of it.
    """

    shape: tuple[int, ...]
    dim: int | None
    grid: RankGrid

    def tensor_parallel_range(self, tp_rank: int) -> DimRange | None:
        """Return the range of the parameter that is a rank's part in tensor parallelism; None if that is all of it."""
        if self.dim is None:
            return None
        start, stop = chunk(self.shape[self.dim], self.grid.tp_size, tp_rank)
        return DimRange(self.dim, start, stop - start)

    def _part_shape(self, tp_rank: int) -> tuple[int, ...]:
        within = self.tensor_parallel_range(tp_rank)
        return self.shape if within is None else within.shape_in(self.shape)

    def shard(self, rank: int) -> tuple[int, int]:
        """Return ``(offset, numel)`` of a rank's shard in its tensor-parallel part of the parameter, flat."""
        position = self.grid.positions[rank]
        rows, *others = self._part_shape(position.tp_rank)
        start, stop = chunk(rows, self.grid.shards, position.shard)
        return start * math.prod(others), (stop - start) * math.prod(others)

    def part_of(self, values: Tensor, tp_rank: int) -> Tensor:
        """Return one tensor-parallel part, flat, of the whole parameter, flat."""
        within = self.tensor_parallel_range(tp_rank)
        return values if within is None else values.view(self.shape).narrow(*within).reshape(-1)

    def joined(self, by_rank: Sequence[Tensor]) -> Tensor:
        """Return the whole parameter, flat, from the shards of all ranks."""
        parts: list[dict[int, Tensor]] = [{} for _ in range(self.grid.tp_size)]
        for position, values in zip(self.grid.positions, by_rank, strict=True):
            if position.replica == 0:
                parts[position.tp_rank][position.shard] = values
        whole = [torch.cat([shards[each] for each in sorted(shards)]) for shards in parts]
        if self.dim is None:
            return whole[0]
        shaped = [values.view(self._part_shape(tp_rank)) for tp_rank, values in enumerate(whole)]
        return torch.cat(shaped, self.dim).reshape(-1)


def chunk(size: int, chunks: int, number: int) -> tuple[int, int]:
    """Return where chunk ``number`` begins and ends, as ``torch.chunk`` divides; the last chunks may be empty."""
    step = -(-size // chunks)
    return min(number * step, size), min((number + 1) * step, size)

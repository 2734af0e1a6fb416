"""Layout of the parameters of one optimizer over ranks: buckets, which are reduced together, divisions, and grids.

These are frozen numbers: the ranks of a running job are not used. A bucket holds parameters of one kind whose gradients
are reduced together. It is divided into one shard for each rank, all of the same length (the last ones end in padding),
so that every rank has an equal share of every bucket. A range is the part of one parameter in one shard.

At stage 3 a parameter is divided by tensor parallelism first, and then by FSDP2, over a grid of ranks.
"""

from __future__ import annotations

import functools
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from longshore.layout.tiles import DimRange, Range, Spec, align


class Member(NamedTuple):
    """A parameter in a bucket; it starts where the member before it ends."""

    parameter: int
    numel: int


@dataclass(frozen=True)
class Bucket:
    """Parameters of one dtype that are reduced together, and the ranges of them that each rank has."""

    index: int
    members: tuple[Member, ...]
    dtype: torch.dtype
    shard_numel: int
    first_key: int
    division: Division = field(repr=False, compare=False)

    @functools.cached_property
    def parameters(self) -> frozenset[int]:
        """Indices of its members."""
        return frozenset(member.parameter for member in self.members)

    @functools.cached_property
    def numel(self) -> int:
        return sum(member.numel for member in self.members)

    @functools.cached_property
    def ranges(self) -> tuple[tuple[Range, ...], ...]:
        """Ranges of the shard of each rank, in order of ``shard_offset``."""
        return tuple(tuple(self.division.shard(self, rank)) for rank in range(self.division.ranks))

    @functools.cached_property
    def owned(self) -> Sequence[Range]:
        """Ranges that this rank steps."""
        return tuple(self.division.owned(self))

    def key(self, place: int, rank: int) -> int:
        """Return the key of a rank's range of the member at ``place``, of which it has one at most."""
        return self.first_key + place * self.division.ranks + rank

    @property
    def next_key(self) -> int:
        return self.key(len(self.members), 0)


class Division(ABC):
    """Division of parameters over ranks, as one of them sees it.

    Attributes:
        ranks: number of ranks that share each bucket: those whose gradients are averaged.
        rank: place of this rank among them.
    """

    def __init__(self, ranks: int, rank: int) -> None:
        if ranks < 1:
            raise ValueError(f"a bucket is shared by at least one rank, not {ranks}")
        self.ranks = ranks
        self.rank = rank

    def buckets(
        self, specs: Iterable[Spec], bucket_numel: int, first_bucket: int = 0, first_key: int = 0
    ) -> tuple[Bucket, ...]:
        """Fill buckets with parameters, last registered first: in the order in which backward brings gradients.

        A parameter is never divided between buckets: one that is larger than ``bucket_numel`` has a bucket of its own.
        Parameters without elements are in none.

        Args:
            specs: parameters by their index, in the order in which they were registered.
            bucket_numel: maximal number of elements in a bucket, at least 1.
            first_bucket: the index of the first bucket.
            first_key: a number from which on keys of ranges are free.

        Raises:
            ValueError: a numel is negative, or a size is below 1.
        """
        if bucket_numel < 1:
            raise ValueError(f"a bucket has at least one element, not {bucket_numel}")
        found: list[Bucket] = []
        for index, members in enumerate(self._filled(specs, bucket_numel), first_bucket):
            key = found[-1].next_key if found else first_key
            entries = tuple(Member(spec.key, spec.numel) for spec in members)
            found.append(Bucket(index, entries, members[0].dtype, self._shard_numel(members), key, self))
        return tuple(found)

    def _filled(self, specs: Iterable[Spec], bucket_numel: int) -> list[list[Spec]]:
        filled: list[list[Spec]] = []
        open_buckets: dict[Hashable, tuple[list[Spec], int]] = {}
        for spec in reversed(list(specs)):
            if spec.numel < 0:
                raise ValueError(f"parameter {spec.key} has {spec.numel} elements")
            if spec.numel == 0:
                continue
            members, total = open_buckets.get(self._kind(spec), ([], bucket_numel))
            if total + spec.numel > bucket_numel:
                members, total = [], 0
                filled.append(members)
            members.append(spec)
            open_buckets[self._kind(spec)] = (members, total + spec.numel)
        return filled

    @abstractmethod
    def _kind(self, spec: Spec) -> Hashable:
        """Return a value that all parameters of one bucket have in common."""

    @abstractmethod
    def _shard_numel(self, members: Sequence[Spec]) -> int:
        """Return the number of elements in each rank's shard of a bucket with these members."""

    @abstractmethod
    def shard(self, bucket: Bucket, rank: int) -> Iterable[Range]:
        """Yield the ranges of a rank's shard of a bucket, in order of ``shard_offset``."""

    def owned(self, bucket: Bucket) -> Iterable[Range]:
        """Return the ranges of a bucket that this rank steps."""
        return self.shard(bucket, self.rank)

    @abstractmethod
    def stepped_by_rank(self, parameter: int, bucket: Bucket | None) -> list[int]:
        """Return how many elements of a parameter each rank of the engine steps; ``bucket``: the one that it is in."""

    @abstractmethod
    def most_stepped(self, parameter: int, bucket: Bucket) -> int:
        """Return the most elements of a parameter that any rank steps; found without looking at each rank."""

    def part(self, parameter: int, values: Tensor) -> Tensor:
        """Return the part of a whole parameter, flat, that this rank shares with those it averages gradients with."""
        return values

    def held(self, parameter: int, values: Tensor) -> Tensor:
        """Return the part of a whole parameter, flat, that this rank has where parameters compute."""
        return values

    def joined(self, parameter: int, by_rank: Sequence[Tensor]) -> Tensor:
        """Return a whole parameter, flat, from the part that each rank steps."""
        return torch.cat(tuple(by_rank))  # shards follow one another in the order of the ranks


class Shards(Division):
    """Even division of each bucket, where every rank has all of each parameter on its device: ZeRO-1 and 2."""

    def _kind(self, spec: Spec) -> Hashable:
        return spec.dtype, spec.coding.format.unit

    def _shard_numel(self, members: Sequence[Spec]) -> int:
        numel, unit = sum(spec.numel for spec in members), members[0].coding.format.unit
        return align(-(-numel // self.ranks), unit)

    def shard(self, bucket: Bucket, rank: int) -> Iterator[Range]:
        start, stop, before = rank * bucket.shard_numel, (rank + 1) * bucket.shard_numel, 0
        for place, (parameter, numel) in enumerate(bucket.members):
            first, last = max(before, start), min(before + numel, stop)
            if first < last:
                offset, key = first - before, bucket.key(place, rank)
                yield Range(key, parameter, offset, last - first, first - start, offset)
            before += numel

    def stepped_by_rank(self, parameter: int, bucket: Bucket | None) -> list[int]:
        ranges = () if bucket is None else bucket.ranges
        return [sum(each.numel for each in own if each.parameter == parameter) for own in ranges]

    def most_stepped(self, parameter: int, bucket: Bucket) -> int:
        begin = 0
        for member in bucket.members:
            if member.parameter == parameter:
                first = min(member.numel, bucket.shard_numel - begin % bucket.shard_numel)
                return max(first, min(member.numel - first, bucket.shard_numel))
            begin += member.numel
        raise KeyError(parameter)


class Replicated(Shards):
    """Division of the reduction alone: each rank steps everything, with the same gradients. Stage 0."""

    def owned(self, bucket: Bucket) -> Iterator[Range]:
        for rank, ranges in enumerate(bucket.ranges):
            yield from ranges if rank == self.rank else (each._replace(saves=False) for each in ranges)

    def stepped_by_rank(self, parameter: int, bucket: Bucket | None) -> list[int]:
        return [0 if bucket is None else self.most_stepped(parameter, bucket)] * self.ranks

    def most_stepped(self, parameter: int, bucket: Bucket) -> int:
        return next(member.numel for member in bucket.members if member.parameter == parameter)


class Grid(Division):
    """Division of each parameter by itself, over a grid of ranks: ZeRO-3.

    Buckets are filled by the size of whole parameters, so that they are the same for all ranks of tensor parallelism.

    Args:
        grid: all ranks.
        rank: this rank's number in the grid.
        layout_of: returns the layout of a parameter, by its index, which may be one that is not trained.
        group_of: returns a number for those parameters that are gathered together, which get their gradients together.
    """

    def __init__(
        self,
        grid: RankGrid,
        rank: int,
        layout_of: Callable[[int], ParameterLayout],
        group_of: Callable[[int], Hashable],
    ) -> None:
        self._grid = grid
        self._number = rank
        self._tp_rank = grid.positions[rank].tp_rank
        self.data_ranks = grid.alike(self._tp_rank)
        """Ranks whose gradients are averaged, by their number in the grid."""
        self._layout_of = layout_of
        self._group_of = group_of
        super().__init__(len(self.data_ranks), self.data_ranks.index(rank))

    def _kind(self, spec: Spec) -> Hashable:
        return spec.dtype, self._group_of(spec.key)

    def _shard_numel(self, members: Sequence[Spec]) -> int:
        return align(sum(self._layout_of(spec.key).most_numel(self._tp_rank) for spec in members))

    def shard(self, bucket: Bucket, rank: int) -> Iterator[Range]:
        number, end = self.data_ranks[rank], 0
        replica, _, tp_rank = self._grid.positions[number]
        for place, (parameter, _) in enumerate(bucket.members):
            layout = self._layout_of(parameter)
            offset, numel = layout.shard(number)
            if numel > 0:
                counts = replica == 0 and (tp_rank == 0 or layout.dim is not None)
                within = layout.tensor_parallel_range(tp_rank)
                yield Range(bucket.key(place, rank), parameter, offset, numel, end, 0, counts, counts, within)
                end += numel

    def stepped_by_rank(self, parameter: int, bucket: Bucket | None) -> list[int]:
        layout = self._layout_of(parameter)
        return [layout.shard(rank)[1] for rank in range(len(self._grid.positions))]

    def most_stepped(self, parameter: int, bucket: Bucket) -> int:
        return max(map(self._layout_of(parameter).most_numel, range(self._grid.tp_size)))

    def part(self, parameter: int, values: Tensor) -> Tensor:
        return self._layout_of(parameter).part_of(values, self._tp_rank)

    def held(self, parameter: int, values: Tensor) -> Tensor:
        offset, numel = self._layout_of(parameter).shard(self._number)
        return self.part(parameter, values)[offset : offset + numel]

    def joined(self, parameter: int, by_rank: Sequence[Tensor]) -> Tensor:
        return self._layout_of(parameter).joined(by_rank)


def division_of(
    stage: int, ranks: int, rank: int, shapes: Sequence[tuple[int, ...]] = (), groups: Sequence[Hashable] = ()
) -> Division:
    """Return the division over ``ranks`` at a ZeRO stage; at stage 3, of parameters of these ``shapes``, without tensor
    parallelism or replicas, where those of one of the ``groups`` are gathered together."""
    if stage < 3:
        return Shards(ranks, rank) if stage > 0 else Replicated(ranks, rank)
    grid = RankGrid([[[each] for each in range(ranks)]])
    layouts = [ParameterLayout(shape, None, grid) for shape in shapes]
    return Grid(grid, rank, layouts.__getitem__, groups.__getitem__)


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

    def most_numel(self, tp_rank: int) -> int:
        """Return the number of elements of the largest shard of a tensor-parallel part, which is the first one."""
        rows, *others = self._part_shape(tp_rank)
        return chunk(rows, self.grid.shards, 0)[1] * math.prod(others)

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


@dataclass(frozen=True)
class Layout:
    """Parameters and their buckets, as one rank sees them.

    Attributes:
        division: how buckets are divided over ranks.
        bucket_numel: maximal number of elements in a bucket.
        specs: all parameters by their index, which is the key of each, in the order in which they were added.
        buckets: in the order of their index.
        checksum: of all that ranks have to have in common.
    """

    division: Division = field(compare=False)
    bucket_numel: int
    specs: Mapping[int, Spec] = field(default_factory=dict)
    buckets: tuple[Bucket, ...] = ()
    checksum: int = 0

    def extended(self, specs: Iterable[Spec]) -> Layout:
        """Return this layout with more parameters, in new buckets.

        Raises:
            ValueError: see :meth:`Division.buckets`.
        """
        added = {spec.key: spec for spec in specs}
        if not added:
            return self
        first_key = self.buckets[-1].next_key if self.buckets else 0
        more = self.division.buckets(added.values(), self.bucket_numel, len(self.buckets), first_key)
        checksum = zlib.crc32(repr(list(added.values())).encode(), self.checksum)
        return replace(self, specs={**self.specs, **added}, buckets=self.buckets + more, checksum=checksum)

    @functools.cached_property
    def bucket_of(self) -> Mapping[int, Bucket]:
        """The bucket of each parameter; one without elements is in none."""
        return {member.parameter: bucket for bucket in self.buckets for member in bucket.members}

    @functools.cached_property
    def ranges(self) -> Mapping[int, Range]:
        """The ranges that this rank steps, by their key."""
        return {owned.key: owned for bucket in self.buckets for owned in bucket.owned}

    @functools.cached_property
    def _owned(self) -> Mapping[int, list[Range]]:
        found: dict[int, list[Range]] = {}
        for owned in self.ranges.values():
            found.setdefault(owned.parameter, []).append(owned)
        return found

    def owned(self, parameter: int) -> Sequence[Range]:
        """Return the ranges of a parameter that this rank steps: one at most, except at stage 0."""
        return self._owned.get(parameter, ())

    def stepped_by_rank(self, parameter: int) -> list[int]:
        """Return how many elements of a parameter each rank steps."""
        return self.division.stepped_by_rank(parameter, self.bucket_of.get(parameter))

    def most_stepped(self, parameter: int) -> int:
        """Return the most elements of a parameter that any rank steps."""
        bucket = self.bucket_of.get(parameter)
        return 0 if bucket is None else self.division.most_stepped(parameter, bucket)

    def owners(self, parameter: int) -> tuple[tuple[int, int], ...]:
        """Return the ranks that step a parameter, each with the number of elements that it steps."""
        return tuple((rank, numel) for rank, numel in enumerate(self.stepped_by_rank(parameter)) if numel)

    def parts(self, first_bucket: int = 0) -> list[Spec]:
        """Return the ranges that this rank steps, of the buckets from ``first_bucket`` on, under their keys and in the
        order of its tiles: buckets are filled from the last parameter on."""
        owned = [each for bucket in self.buckets[first_bucket:] for each in bucket.owned]
        return [self.specs[each.parameter].keyed(each.key, each.offset, each.numel) for each in reversed(owned)]

    def in_order_of_tiles(self) -> list[Spec]:
        """Return all parameters that have elements, in the order of :meth:`parts`."""
        return [self.specs[member.parameter] for bucket in self.buckets for member in bucket.members][::-1]

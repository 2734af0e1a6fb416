"""Which rank has what of a parameter that is cut by tensor parallelism first, and then by FSDP2, as frozen numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longshore.layout import Slab


class Place(NamedTuple):
    """Of one rank."""

    replica: int
    shard: int
    part: int
    """Of tensor parallelism."""


@dataclass(frozen=True)
class RankGrid:
    """Ranks as replicas x shards x parts.

    Attributes:
        places: by rank.
    """

    places: tuple[Place, ...]

    @classmethod
    def of(cls, ranks: Sequence[Sequence[Sequence[int]]]) -> RankGrid:
        """``ranks[replica][shard][part]``, all from 0 on.

        Raises:
            ValueError: the ranks of one part are in another order than those of another.
        """
        found = {
            rank: Place(replica, shard, part)
            for replica, shards in enumerate(ranks)
            for shard, parts in enumerate(shards)
            for part, rank in enumerate(parts)
        }
        grid = cls(tuple(found[rank] for rank in range(len(found))))
        orders = {tuple(grid.places[rank][:2] for rank in grid.alike(part)) for part in range(grid.parts)}
        if len(orders) > 1:
            # Gradients are added in the order of the ranks: what all parts have would not get the same bits.
            raise ValueError("the mesh has its ranks in another order for some of tensor parallelism's ranks")
        return grid

    @property
    def shards(self) -> int:
        return 1 + max(place.shard for place in self.places)

    @property
    def parts(self) -> int:
        return 1 + max(place.part for place in self.places)

    def alike(self, part: int) -> list[int]:
        """The ranks that have this part, in order: data parallel ones, whose gradients are averaged."""
        return [rank for rank, place in enumerate(self.places) if place.part == part]

    def data_place(self, rank: int) -> int:
        """Of a rank among those of its part."""
        return self.alike(self.places[rank].part).index(rank)


@dataclass(frozen=True)
class Cut:
    """How one parameter lies on a grid.

    Attributes:
        shape: of all of it.
        dim: along which tensor parallelism cuts it, as ``torch.chunk`` does; None: each part is all of it.
        parts: of tensor parallelism.
        shards: of FSDP2, which cuts each part along its first dimension, as ``torch.chunk`` does too.
    """

    shape: tuple[int, ...]
    dim: int | None
    parts: int
    shards: int

    def slab(self, part: int) -> Slab | None:
        """Where a part lies in the parameter; None: it is all of it."""
        if self.dim is None:
            return None
        start, stop = chunk(self.shape[self.dim], self.parts, part)
        return Slab(self.dim, start, stop - start)

    def part_shape(self, part: int) -> tuple[int, ...]:
        slab = self.slab(part)
        return self.shape if slab is None else slab.shape_in(self.shape)

    def shard(self, place: Place) -> tuple[int, int]:
        """``(offset, numel)`` of a shard in its part, flat."""
        rows, *others = self.part_shape(place.part)
        start, stop = chunk(rows, self.shards, place.shard)
        return start * math.prod(others), (stop - start) * math.prod(others)

    def part_of(self, values: Tensor, part: int) -> Tensor:
        """Of all of the parameter, flat, one part, flat."""
        slab = self.slab(part)
        return values if slab is None else values.view(self.shape).narrow(*slab).reshape(-1)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """All of the parameter, flat, from its parts, flat."""
        if self.dim is None:
            return parts[0]
        shaped = [values.view(self.part_shape(part)) for part, values in enumerate(parts)]
        return torch.cat(shaped, self.dim).reshape(-1)


def chunk(size: int, chunks: int, number: int) -> tuple[int, int]:
    """Where chunk ``number`` begins and ends, as ``torch.chunk`` cuts; the last ones may be empty."""
    step = -(-size // chunks)
    return min(number * step, size), min((number + 1) * step, size)

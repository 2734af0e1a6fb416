"""Which rank has what of a parameter that is divided by tensor parallelism first, and then by FSDP2: frozen numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longshore.layout import Slab


class GridPosition(NamedTuple):
    """Where one rank is in a grid."""

    replica: int
    shard: int
    tp_rank: int
    """Its rank in tensor parallelism."""


@dataclass(frozen=True)
class RankGrid:
    """Ranks as replicas x shards x ranks of tensor parallelism.

    Attributes:
        positions: by rank.
    """

    positions: tuple[GridPosition, ...]

    @classmethod
    def of(cls, ranks: Sequence[Sequence[Sequence[int]]]) -> RankGrid:
        """``ranks[replica][shard][tp_rank]``, all from 0 on.

        Raises:
            ValueError: ranks with one place in tensor parallelism are in another order than those with another place.
        """
        found = {
            rank: GridPosition(replica, shard, tp_rank)
            for replica, shards in enumerate(ranks)
            for shard, parallel in enumerate(shards)
            for tp_rank, rank in enumerate(parallel)
        }
        grid = cls(tuple(found[rank] for rank in range(len(found))))
        orders = {tuple(grid.positions[rank][:2] for rank in grid.alike(tp_rank)) for tp_rank in range(grid.tp_size)}
        if len(orders) > 1:
            # Gradients are added in the order of the ranks: what all of them have would not get the same bits.
            raise ValueError("the mesh has its ranks in another order for some of tensor parallelism's ranks")
        return grid

    @property
    def shards(self) -> int:
        return 1 + max(position.shard for position in self.positions)

    @property
    def tp_size(self) -> int:
        return 1 + max(position.tp_rank for position in self.positions)

    def alike(self, tp_rank: int) -> list[int]:
        """The ranks with this place in tensor parallelism, in order: their gradients are averaged."""
        return [rank for rank, position in enumerate(self.positions) if position.tp_rank == tp_rank]

    def data_rank(self, rank: int) -> int:
        """The place of a rank among those that are alike."""
        return self.alike(self.positions[rank].tp_rank).index(rank)


@dataclass(frozen=True)
class ParameterLayout:
    """How one parameter lies on a grid.

    Attributes:
        shape: of all of it.
        dim: along which tensor parallelism divides it, as ``torch.chunk`` does; None: each of its ranks has all of it.
        tp_size: how many ranks tensor parallelism has.
        shards: into how many shards FSDP2 divides what each of those has, along the first dimension, as ``torch.chunk``
            does too.
    """

    shape: tuple[int, ...]
    dim: int | None
    tp_size: int
    shards: int

    def slab(self, tp_rank: int) -> Slab | None:
        """Where a rank's part of tensor parallelism lies in the parameter; None: it is all of it."""
        if self.dim is None:
            return None
        start, stop = chunk(self.shape[self.dim], self.tp_size, tp_rank)
        return Slab(self.dim, start, stop - start)

    def part_shape(self, tp_rank: int) -> tuple[int, ...]:
        slab = self.slab(tp_rank)
        return self.shape if slab is None else slab.shape_in(self.shape)

    def shard(self, position: GridPosition) -> tuple[int, int]:
        """``(offset, numel)`` of a shard in its part, flat."""
        rows, *others = self.part_shape(position.tp_rank)
        start, stop = chunk(rows, self.shards, position.shard)
        return start * math.prod(others), (stop - start) * math.prod(others)

    def part_of(self, values: Tensor, tp_rank: int) -> Tensor:
        """One part, flat, from all of the parameter, flat."""
        slab = self.slab(tp_rank)
        return values if slab is None else values.view(self.shape).narrow(*slab).reshape(-1)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """All of the parameter, flat, from its parts, flat."""
        if self.dim is None:
            return parts[0]
        shaped = [values.view(self.part_shape(tp_rank)) for tp_rank, values in enumerate(parts)]
        return torch.cat(shaped, self.dim).reshape(-1)


def chunk(size: int, chunks: int, number: int) -> tuple[int, int]:
    """Where chunk ``number`` begins and ends, as ``torch.chunk`` divides; the last ones may be empty."""
    step = -(-size // chunks)
    return min(number * step, size), min((number + 1) * step, size)

"""Matrices that several ranks share: one rank transforms each, and the others send their pieces and get them back.

Which rank that is follows from the sizes alone, so that no rank has to ask. Pieces travel in bfloat16, in which a
transformation begins and ends: nothing is rounded on the way, and the bits are those of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longshore.errors import BrokenStateError
from longshore.ranks.data_plane import Outgoing
from longshore.store.ownership import SharedOwnership
from longshore.tiles import MATRICES_UNDER_WAY, LocalExchange, Matrix, MatrixExchange
from longshore.tiles.events import Recorder, commit_moves
from longshore.transfer import CopyStreams

_BATCH_NUMEL = 1 << 24
"""Elements of the matrices that travel together, unless these are too few for a large one on each rank."""


class _Shared(NamedTuple):
    """A batch of matrices of which several ranks have pieces.

    Attributes:
        owners: for each matrix, the rank that transforms it.
        ranges: for each matrix and rank, ``(offset, numel)`` of the parts that the rank has, in order.
    """

    matrices: Sequence[Matrix]
    owners: Sequence[int]
    ranges: Sequence[Sequence[Sequence[tuple[int, int]]]]

    def part_bytes(self, world_size: int) -> int:
        """Return the most bytes that one rank sends to another, or gets from it."""
        sums = [[0] * world_size for _ in range(world_size)]
        for owner, by_rank in zip(self.owners, self.ranges, strict=True):
            for rank, parts in enumerate(by_rank):
                sums[owner][rank] += 2 * sum(numel for _, numel in parts)
        return max(map(max, sums))

    def owned_by(self, rank: int) -> Iterator[tuple[Matrix, Sequence[Sequence[tuple[int, int]]]]]:
        for matrix, owner, by_rank in zip(self.matrices, self.owners, self.ranges, strict=True):
            if owner == rank:
                yield matrix, by_rank


class RankExchange(MatrixExchange):
    """Exchange of one commit of several ranks, which all have to make it with the same ``matrices``.

    Matrices that one rank has all of are transformed there, as are those that every rank has all of.

    Args:
        ownership: knows the ranks' parts.
        matrices: all that are stepped on any rank, in the order of all ranks.
        streams: of this rank's store.
        recorder: receives the transformations on this rank.
    """

    def __init__(
        self, ownership: SharedOwnership, matrices: Sequence[Matrix], streams: CopyStreams, recorder: Recorder
    ) -> None:
        self._ownership = ownership
        self._collectives = ownership.collectives
        self._streams = streams
        self._local = LocalExchange(streams, recorder)
        shared = [each for each in matrices if not self._is_whole(each)]
        self._shared = [self._batch(each) for each in batched(shared, self._collectives.world_size)]
        self._ends = False
        """Whether the ranks meet no more in this commit."""
        self._rounds = [place for _, place in commit_moves(len(self._shared), MATRICES_UNDER_WAY)]
        """Places of the batches for which the ranks have still to meet, in the order of the meetings: pieces come, and
        results go back."""

    def _is_whole(self, matrix: Matrix) -> bool:
        return all(numel == matrix.numel for _, numel in self._ownership.layout.owners(matrix.parameter))

    def _batch(self, matrices: Sequence[Matrix]) -> _Shared:
        """Share the work of a batch."""
        owners = owners_of(matrices, self._collectives.world_size)
        ranges = [
            [
                [(part.offset, part.numel) for part in own if part.parameter == matrix.parameter]
                for own in self._ownership.layout.bucket_of[matrix.parameter].ranges
            ]
            for matrix in matrices
        ]
        return _Shared(matrices, owners, ranges)

    # -- MatrixExchange -------------------------------------------------------

    def batches(self, matrices: Mapping[int, Matrix]) -> Sequence[Sequence[Matrix]]:
        shared = [each.matrices for each in self._shared]
        travelling = {matrix.parameter for batch in shared for matrix in batch}
        here = {parameter: each for parameter, each in matrices.items() if parameter not in travelling}
        # All ranks have the shared ones, and have them first.
        return [*shared, *self._local.batches(here)]

    def reserve(self, batches: Sequence[Sequence[Matrix]]) -> None:
        return  # before the ranks agreed to commit: see ShardedStore

    def begin(self, batch: Sequence[Matrix], pieces: Mapping[int, Tensor]) -> Any:
        shared = next((each for each in self._shared if each.matrices is batch), None)
        if shared is None:
            return self._local.begin(batch, pieces)

        def gather(outgoing: Outgoing, rows: Tensor) -> dict[int, Tensor]:
            ends = [0] * len(rows)
            for matrix, owner in zip(shared.matrices, shared.owners, strict=True):
                if (piece := pieces.get(matrix.parameter)) is not None:
                    rows[owner][ends[owner] : ends[owner] + piece.numel()].copy_(piece)
                    ends[owner] += piece.numel()
            received = self._exchange(outgoing)
            begins = [0] * len(received)
            results = {}
            for matrix, by_rank in shared.owned_by(self._collectives.rank):
                whole = torch.empty(matrix.numel, dtype=torch.bfloat16, device=received[0].device)
                for rank, parts in enumerate(by_rank):
                    for offset, numel in parts:
                        whole[offset : offset + numel] = received[rank][begins[rank] : begins[rank] + numel]
                        begins[rank] += numel
                results[matrix.parameter] = matrix.transformed(whole, self._local.recorder)
            return results

        return shared, self._meet(shared, gather)

    def finish(self, under_way: Any) -> Mapping[int, Tensor]:
        if not isinstance(under_way[0], _Shared):
            return self._local.finish(under_way)
        shared, results = under_way

        def scatter(outgoing: Outgoing, rows: Tensor) -> dict[int, Tensor]:
            ends = [0] * len(rows)
            for matrix, by_rank in shared.owned_by(self._collectives.rank):
                for rank, parts in enumerate(by_rank):
                    for offset, numel in parts:
                        rows[rank][ends[rank] : ends[rank] + numel] = results[matrix.parameter][offset : offset + numel]
                        ends[rank] += numel
            received = self._exchange(outgoing)
            begins = [0] * len(received)
            pieces = {}
            for matrix, owner, by_rank in zip(shared.matrices, shared.owners, shared.ranges, strict=True):
                numel = sum(count for _, count in by_rank[self._collectives.rank])
                piece = received[owner][begins[owner] : begins[owner] + numel]
                pieces[matrix.parameter] = piece.to("cpu", copy=True)  # the memory is that of the next meeting, too
                begins[owner] += numel
            return pieces

        return self._meet(shared, scatter)

    # -- meetings -------------------------------------------------------------

    def _meet(self, shared: _Shared, job: Callable[[Outgoing, Tensor], dict[int, Tensor]]) -> dict[int, Tensor]:
        ready = self._streams.marks(())

        def run() -> dict[int, Tensor]:
            with self._streams.aside(ready):
                outgoing, rows = self._outgoing(shared)
                return job(outgoing, rows)

        return self._collectives.run(run)

    def _outgoing(self, shared: _Shared) -> tuple[Outgoing, Tensor]:
        world_size = self._collectives.world_size
        outgoing = self._collectives.data.outgoing(world_size * shared.part_bytes(world_size))
        return outgoing, outgoing.memory.view(torch.bfloat16).view(world_size, -1)

    def _exchange(self, outgoing: Outgoing) -> list[Tensor]:
        """Exchange the rows. Raise BrokenStateError if another rank failed, and comes no more."""
        data, self._ends = self._collectives.data, True  # unless it succeeds
        if gone := [rank for rank, (failed,) in enumerate(data.tell(outgoing, [0]).tolist()) if failed]:
            which = ", ".join(map(str, gone))
            raise BrokenStateError(f"rank {which} failed in this step, and some weights were stepped")
        received = [part.view(torch.bfloat16) for part in data.exchange(outgoing)]
        self._ends = False
        self._rounds.pop(0)
        return received

    def abandon(self) -> None:
        """Tell the other ranks, who wait in their next meeting, that this rank failed. The caller goes on to a meeting
        after those of this commit."""
        if self._ends or not self._rounds:
            return
        shared = self._shared[self._rounds[0]]

        def tell() -> None:
            outgoing, _ = self._outgoing(shared)
            self._collectives.data.tell(outgoing, [1])

        self._collectives.run(tell)


def _cost(matrix: Matrix) -> int:
    """Return the cost of a transformation, up to a factor: multiplications."""
    shapes = [matrix.layout.shape_of(block) for block in matrix.layout.blocks]
    return sum(rows * columns * min(rows, columns) for rows, columns in shapes)


def owners_of(matrices: Sequence[Matrix], world_size: int) -> Sequence[int]:
    """Return the rank that transforms each matrix of a batch: the most expensive matrix is given away first, each to
    the rank that has the least so far."""
    costs, owners = [0] * world_size, [0] * len(matrices)
    for place in sorted(range(len(matrices)), key=lambda each: (-_cost(matrices[each]), each)):
        owners[place] = min(range(world_size), key=costs.__getitem__)
        costs[owners[place]] += _cost(matrices[place])
    return owners


def batched(matrices: Sequence[Matrix], world_size: int) -> Iterator[Sequence[Matrix]]:
    """Yield consecutive matrices that travel together: enough that no rank waits while another transforms a large one.
    A rank has memory for its own of a batch, and for its parts of all."""
    most = max(_BATCH_NUMEL, world_size * max((each.numel for each in matrices), default=0))
    batch: list[Matrix] = []
    for matrix in matrices:
        if batch and sum(each.numel for each in batch) + matrix.numel > most:
            yield batch
            batch = []
        batch.append(matrix)
    if batch:
        yield batch

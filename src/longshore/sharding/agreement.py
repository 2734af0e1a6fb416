"""What the ranks tell each other before they reduce or publish, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longshore.errors import LongshoreError, RankError
from longshore.sharding.contributions import Contributions
from longshore.sharding.lane import CollectiveLane

_MASK_BITS = 62
_HEAD = 5
"""Numbers of a row ahead of those of buckets and parameters."""


@dataclass(frozen=True)
class Statement:
    """One rank's side.

    Attributes:
        deferred: one entry for each round that it still has to reduce: whether
            it brings sums, which need the dtype of sums on their way.
        failed: it cannot go on with this window.
        backwards: how many it has begun in this window.
        order: its proposal for launching buckets.
        used: for each parameter, whether it brought a gradient.
        early: what it brings was reduced during its last backward already.
    """

    deferred: Sequence[bool] = ()
    failed: bool = False
    backwards: int = 0
    order: Sequence[int] = ()
    used: Sequence[bool] = ()
    early: bool = False

    @classmethod
    def of(cls, deferred: Sequence[Contributions], *args: object, **kwargs: object) -> Statement:
        return cls([contributions.summed for contributions in deferred], *args, **kwargs)  # pyright: ignore

    def row(self) -> torch.Tensor:
        """int64, as long on every rank that has the same buckets and parameters."""
        # A mask; what does not fit is as if summed, which is right for any round.
        mask = sum(1 << bit for bit, summed in enumerate(self.deferred[:_MASK_BITS]) if summed)
        head = [len(self.deferred), mask, self.failed, self.backwards, self.early]
        return torch.tensor([*head, *self.order, *self.used], dtype=torch.int64)


@dataclass(frozen=True)
class Agreement:
    """What all ranks do, the same on each; fields as in :class:`Statement`."""

    deferred: Sequence[bool]
    failed: Sequence[int]
    """Ranks."""
    backwards: Sequence[int]
    """By rank."""
    order: Sequence[int]
    used: Sequence[bool]
    used_by_rank: Sequence[Sequence[bool]]
    early: bool

    def check(self, rank: int, failure: BaseException | None, kind: type[LongshoreError]) -> None:
        """Raise where any rank failed: this rank's own ``failure``, or a ``kind`` that names the ranks."""
        if failure is not None:
            raise failure
        others = [other for other in self.failed if other != rank]
        if others:
            raise kind(
                f"rank {', '.join(map(str, others))} failed in this window (see its own error), so no rank can step; "
                "zero_grad() on every rank discards the window"
            )

    def check_backwards(self) -> None:
        """Raises RankError where the ranks ran different numbers of backwards in this window."""
        if len(set(self.backwards)) > 1:
            counts = ", ".join(f"rank {rank} ran {count}" for rank, count in enumerate(self.backwards))
            raise RankError(
                f"the ranks ran different numbers of backwards in this window: {counts}; every rank has to run the same"
            )


def agree_on(lane: CollectiveLane, statement: Statement) -> Agreement:
    """Exchange statements; in a job of the lane, after the ranks met."""
    rows = lane.rows(statement.row()).tolist()
    count = max(row[0] for row in rows)
    mask = 0
    for row in rows:
        mask |= row[1]
    orders, used = len(statement.order), len(statement.used)
    return Agreement(
        deferred=[bit >= _MASK_BITS or bool(mask >> bit & 1) for bit in range(count)],
        failed=[rank for rank, row in enumerate(rows) if row[2]],
        backwards=[row[3] for row in rows],
        order=rows[0][_HEAD : _HEAD + orders],
        used=[any(row[_HEAD + orders + index] for row in rows) for index in range(used)],
        used_by_rank=[[bool(bit) for bit in row[_HEAD + orders :]] for row in rows],
        early=all(row[4] for row in rows),
    )


def check_same(lane: CollectiveLane, values: Mapping[str, Tensor]) -> None:
    """Raises RankError where tensors, by name, have other bits on some rank; in a job of the lane."""
    sums = [int(tensor.contiguous().view(torch.uint8).long().sum()) for tensor in values.values()]
    rows = lane.rows(torch.tensor(sums, dtype=torch.int64))
    for name, column in zip(values, rows.T, strict=True):
        differing = [rank for rank, found in enumerate(column.tolist()) if found != column[0]]
        if differing:
            raise RankError(
                f"parameter {name} of rank {', '.join(map(str, differing))} differs from that of rank 0; "
                "something wrote it on some ranks only"
            )

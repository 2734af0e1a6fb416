"""Messages between ranks: the next action of each, its window, and its gradients for that."""

from __future__ import annotations

import functools
import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longshore.errors import BrokenStateError, LongshoreError, RankError
from longshore.kernels import Scale
from longshore.tiles import ParameterStep

_MASK_BITS = 62
_HEAD = 7
"""Count of the numbers in a row before those of buckets and parameters."""

Rows = Callable[[Tensor], Tensor]
"""Function that gathers every rank's row of numbers, stacked; all ranks have to call it, after a meeting."""


def as_words(flags: Sequence[bool]) -> list[int]:
    """Return flags as the bits of numbers, so that they fit the message of a meeting."""
    return [
        sum(flag << bit for bit, flag in enumerate(flags[first : first + _MASK_BITS]))
        for first in range(0, len(flags), _MASK_BITS)
    ]


def as_flags(words: Sequence[int], count: int) -> list[bool]:
    """Return ``count`` flags from the numbers that :func:`as_words` made of them."""
    return [bool(word >> bit & 1) for word in words for bit in range(_MASK_BITS)][:count]


@dataclass(frozen=True)
class Statement:
    """One rank's side of an agreement.

    Attributes:
        deferred: for each round that the rank still has to reduce, whether its gradients are sums, which have a dtype
            of their own.
        failed: whether the rank cannot go on with this window.
        backwards: how many backwards it has begun in this window.
        order: the order in which it proposes to launch buckets.
        used: for each parameter, whether the rank has a gradient.
        early: whether all of its gradients were already reduced during its last backward.
        layout: checksum of the parameters that it laid out.
        reduced: how many reductions its window had.
    """

    deferred: Sequence[bool] = ()
    failed: bool = False
    backwards: int = 0
    order: Sequence[int] = ()
    used: Sequence[bool] = ()
    early: bool = False
    layout: int = 0
    reduced: int = 0

    def numbers(self) -> list[int]:
        """Return the statement as numbers, equally many on all ranks with the same buckets and parameters."""
        # Rounds beyond the mask count as summed, which is right for any round.
        mask = sum(1 << bit for bit, summed in enumerate(self.deferred[:_MASK_BITS]) if summed)
        head = [len(self.deferred), mask, self.failed, self.backwards, self.early, self.layout, self.reduced]
        return [*map(int, head), *self.order, *as_words(self.used)]


@dataclass(frozen=True)
class Agreement:
    """Result of an agreement, equal on all ranks; the fields are those of :class:`Statement`.

    ``failed`` lists ranks, and ``backwards`` and ``reduced`` are by rank.
    """

    deferred: Sequence[bool]
    failed: Sequence[int]
    backwards: Sequence[int]
    order: Sequence[int]
    used: Sequence[bool]
    used_by_rank: Sequence[Sequence[bool]]
    early: bool
    reduced: Sequence[int]

    def check(self, rank: int, failure: BaseException | None, kind: type[LongshoreError]) -> None:
        """Raise if any rank failed: this rank's own ``failure``, or an error of ``kind`` that names the ranks."""
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback has this frame: a cycle
        others = ", ".join(str(other) for other in self.failed if other != rank)
        if others and kind is BrokenStateError:
            raise kind(
                f"rank {others} failed in the middle of this step (see its own error), so some weights were stepped "
                "and others were not; load the model's weights and the optimizer's state on every rank before going on"
            )
        if others:
            raise kind(
                f"rank {others} failed in this window (see its own error), so no rank can step; "
                "zero_grad() on every rank discards the window"
            )

    def check_reduced(self) -> None:
        """Raise RankError if some ranks discarded gradients that others still have."""
        if len(set(self.reduced)) > 1:
            counts = ", ".join(f"rank {rank} has those of {count}" for rank, count in enumerate(self.reduced))
            raise RankError(
                f"some ranks discarded gradients that had been reduced with those of the others: of the reductions of "
                f"this window {counts}; call zero_grad() on every rank"
            )

    def check_backwards(self) -> None:
        """Raise RankError if the ranks ran different numbers of backwards in this window."""
        if len(set(self.backwards)) > 1:
            counts = ", ".join(f"rank {rank} ran {count}" for rank, count in enumerate(self.backwards))
            raise RankError(
                f"the ranks ran different numbers of backwards in this window: {counts}; every rank has to run the same"
            )


def agreement_of(numbers: Tensor, statement: Statement) -> Agreement:
    """Return the agreement of the ranks, from the ``numbers`` of their statements, int64 ``[world_size, n]``; this
    rank's is ``statement``. Raises RankError if they laid out different parameters."""
    rows = numbers.tolist()
    if any(row[5] != rows[0][5] for row in rows):
        raise RankError("the ranks train different parameters; freeze and thaw the same ones on every rank")
    mask = functools.reduce(operator.or_, (row[1] for row in rows))
    first_used = _HEAD + len(statement.order)
    used_by_rank = [as_flags(row[first_used:], len(statement.used)) for row in rows]
    return Agreement(
        deferred=[bit >= _MASK_BITS or bool(mask >> bit & 1) for bit in range(max(row[0] for row in rows))],
        failed=[rank for rank, row in enumerate(rows) if row[2]],
        backwards=[row[3] for row in rows],
        order=rows[0][_HEAD:first_used],
        used=[any(column) for column in zip(*used_by_rank, strict=True)],
        used_by_rank=used_by_rank,
        early=all(row[4] for row in rows),
        reduced=[row[6] for row in rows],
    )


def verdict_number(steps: Mapping[int, ParameterStep], scale: Scale) -> int:
    """Return a checksum of the parameters to step, their rules and the scale; equal verdicts have equal numbers."""
    rules = sorted({repr(rule) for rule in {id(step.rule): step.rule for step in steps.values()}.values()})
    return zlib.crc32(repr((sorted(steps), rules, scale)).encode())


def check_same(gather_rows: Rows, values: Mapping[str, Tensor]) -> None:
    """Raise RankError if any of the tensors (by parameter name) differs in any bit between ranks."""
    sums = [int(tensor.contiguous().view(torch.uint8).long().sum()) for tensor in values.values()]
    rows = gather_rows(torch.tensor(sums, dtype=torch.int64))
    for name, column in zip(values, rows.T, strict=True):
        differing = [rank for rank, found in enumerate(column.tolist()) if found != column[0]]
        if differing:
            raise RankError(
                f"parameter {name} of rank {', '.join(map(str, differing))} differs from that of rank 0; "
                "something wrote it on some ranks only"
            )

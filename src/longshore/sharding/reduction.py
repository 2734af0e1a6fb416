"""Reducing gradients: in rounds, bucket by bucket.

Every rank sends each other rank its shard of a bucket, and each adds up its own. The gradients travel in their own
dtype and are added in float32, rank by rank in order. That costs the bytes of a reduce-scatter in the gradients' dtype,
and gives the bits of one in float32, the same in every run.

A bucket goes in slices: a slice is the same range of every rank's shard. So the buffers are small, stay allocated, and
are warm in the cache; and a gradient is let go of as soon as its last slice is packed.

What one rank sends another carries, behind the slice, one byte for each of its shard ranges: whether the sender has a
gradient of that parameter. So a range that nobody used is not an arrival, and one that only some used is not touched by
the others' zeros.
"""

from __future__ import annotations

from collections.abc import Callable, KeysView, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longshore.host import HostStore
from longshore.sharding.agreement import Action, Statement, agree_on
from longshore.sharding.bucket import Bucket, ShardRange, SliceEntry, slice_entries, slices
from longshore.sharding.collective_thread import CollectiveThread
from longshore.sharding.ownership import Ownership

_ALIGNMENT = 64
SLICE_NUMEL = 1 << 22
"""Elements of one slice over all ranks."""
_BLOCK_NUMEL = 1 << 17
"""Elements that a CPU adds up at a time, while they are in its cache."""


@dataclass(frozen=True)
class ReductionSettings:
    """How gradients of several ranks become one.

    Attributes:
        bucket_numel: elements that are reduced together.
        each_backward: reduce after every backward (ZeRO-2); otherwise sums stay on the device, and are reduced once
            (stages 0 and 1).
        early: launch buckets while backward goes on; where they are reduced once, while the backward goes on that is
            known to be the last.
        wire_dtype: in which gradients travel; None: in their own.
        sum_dtype: of sums on the device before a reduction.
        predivide: divides gradients before they are added (against overflow in float16); the rest of the mean is
            divided out afterwards.
    """

    bucket_numel: int
    each_backward: bool
    early: bool = True
    wire_dtype: torch.dtype | None = None
    sum_dtype: torch.dtype = torch.float32
    predivide: float = 1.0


class PendingGradients:
    """What one rank brings to the next reduction: gradients by parameter, not reduced yet.

    The first gradient of a parameter is kept as it is, later ones are added in ``dtype`` (law 1).
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._gradients: dict[int, Tensor] = {}
        self._summed: set[int] = set()
        self._lent: set[int] = set()
        self.outdated = False
        """Whether there is more, or less, than what was lent."""

    def __len__(self) -> int:
        return len(self._gradients)

    @property
    def parameters(self) -> KeysView[int]:
        """The parameters that have a gradient here."""
        return self._gradients.keys()

    @property
    def summed(self) -> bool:
        """Whether any of them is a sum, which its parameter's dtype may not hold."""
        return bool(self._summed)

    def add(self, parameter: int, gradient: Tensor) -> None:
        """Take one more gradient, flat."""
        held, lent = self._gradients.get(parameter), parameter in self._lent
        self.outdated = self.outdated or lent
        if held is None:
            self._gradients[parameter] = gradient
        elif parameter in self._summed and not lent:
            held.add_(gradient.to(self._dtype))  # rounded first, as below: the same bits lent or not
        else:
            # Out of place: the first one may be the user's own tensor, and what was lent is being read.
            self._gradients[parameter] = held.to(self._dtype) + gradient.to(self._dtype)
            self._summed.add(parameter)

    def forget(self, parameter: int) -> None:
        self.outdated = self.outdated or (parameter in self._lent and parameter in self._gradients)
        self._gradients.pop(parameter, None)
        self._summed.discard(parameter)

    def lend(self, parameters: list[int]) -> dict[int, Tensor]:
        """The gradients of these parameters, to be read while they stay here; see :attr:`outdated`."""
        self._lent.update(parameters)
        return {parameter: self._gradients[parameter] for parameter in parameters if parameter in self._gradients}

    def take(self, parameters: list[int]) -> dict[int, Tensor]:
        """Remove the gradients of these parameters and return them."""
        return {parameter: self._gradients.pop(parameter) for parameter in parameters if parameter in self._gradients}


Launch = Callable[["Round", Bucket, dict[int, Tensor]], None]


class Round:
    """The gradients of one backward on their way into buckets: each bucket is reduced exactly once, in an order that
    all ranks share (law 7).

    A bucket is launched when all of its parameters have come and every bucket before it in the order has been launched.
    :meth:`close` launches the rest, without what was not used here.

    Args:
        number: counts the rounds of a window, from 1.
        order: all buckets, in the order in which they are launched.
        launch: called with the bucket and the gradients that came for it.
        early: launch during backward; otherwise everything waits for :meth:`close`.
        lends: the gradients stay where they are until the step.
    """

    def __init__(
        self, number: int, order: Sequence[Bucket], launch: Launch, early: bool = True, lends: bool = False
    ) -> None:
        self.number = number
        self.lends = lends
        self.failed = False
        """Set where the ranks could not meet: what was launched must not run."""
        self.sums = False
        """Whether any rank's gradients may be sums; known once the ranks met."""
        self.completed: list[int] = []
        """Buckets that all of their parameters reached, in the order in which that happened."""
        self._order = order
        self._launch = launch
        self._early = early
        self._next = 0
        self._missing = {bucket.index: len(bucket.members) for bucket in order}
        self._gradients: dict[int, dict[int, Tensor]] = {bucket.index: {} for bucket in order}

    def take(self, bucket: int, parameter: int, gradient: Tensor) -> bool:
        """Take a gradient along; False where the round has no more place for it.

        Reentrant checkpointing brings a parameter twice within one backward.
        """
        waiting = self._gradients.get(bucket)
        if waiting is None or parameter in waiting:
            return False
        waiting[parameter] = gradient
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            self.completed.append(bucket)
            while self._early and self._next < len(self._order) and self._missing[self._order[self._next].index] == 0:
                self._launch_next()
        return True

    def close(self) -> None:
        """Launch the rest: the backward is over."""
        while self._next < len(self._order):
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self._order[self._next]
        self._next += 1
        self._launch(self, bucket, self._gradients.pop(bucket.index))

    def reduced_all_of(self, pending: Sequence[PendingGradients]) -> bool:
        """Whether this round, which has run, reduced these gradients as they are now."""
        # A sum that arose within that backward (reentrant checkpointing) left in the dtype of its parameter.
        return not self.failed and not any(some.outdated or (some.summed and not self.sums) for some in pending)


class Reducer:
    """Runs rounds on the thread of collectives: mean gradients of the owned shard ranges arrive in ``local``."""

    def __init__(self, local: HostStore, ownership: Ownership, settings: ReductionSettings) -> None:
        self._local = local
        self._ownership = ownership
        self._settings = settings
        self._collectives = ownership.collectives

    def begin(self, current: Round, pending: list[PendingGradients]) -> None:
        """Queue the meeting that opens a round, and the reduction of what was kept before it."""
        buckets = list(self._ownership.buckets)  # step() may add some while the thread is still at this round
        ready = self._local.transfer.mark()
        window = self._ownership.window.number  # which changes when another rank gives up

        def open_round() -> None:
            try:
                self._collectives.meet(Action.BACKWARD, current.number, window)
                statement = Statement([some.summed for some in pending])
                summed = agree_on(self._collectives.rows, statement).deferred
                self.reduce_pending(pending, summed, buckets, ready)
            except BaseException:
                current.failed = True
                raise

        self._collectives.submit(open_round)

    def begin_last(self, closing: Round, sums: bool) -> None:
        """Queue the meeting that opens the round of the last backward; ``sums``: this rank may bring some."""

        def open_round() -> None:
            try:
                if not self._collectives.meet(Action.CLOSE, closing.number, self._ownership.window.number):
                    closing.failed = True  # another rank is at its step already, and this one will be
                    return
                closing.sums = any(agree_on(self._collectives.rows, Statement([sums])).deferred)
            except BaseException:
                closing.failed = True
                raise

        self._collectives.submit(open_round)

    def launch(self, current: Round, bucket: Bucket, gradients: dict[int, Tensor]) -> None:
        """Queue the reduction of one bucket of a round."""
        ready = self._local.transfer.mark()
        held_bytes = 0  # where gradients stay anyway, nobody waits for memory
        if not current.lends:
            held_bytes = sum(gradient.numel() * gradient.element_size() for gradient in gradients.values())

        def reduce() -> None:
            if not current.failed:
                with self._local.transfer.aside(ready):
                    self.reduce(bucket, gradients, current.sums)
            gradients.clear()  # also where the round did not take place

        self._collectives.submit(reduce, held_bytes)

    def reduce_pending(
        self, pending: list[PendingGradients], rounds: Sequence[bool], buckets: Sequence[Bucket], ready: Any
    ) -> None:
        """Run agreed rounds on gradients that were kept, in a job; ``rounds`` says of each whether any rank brings
        sums."""
        for number, summed in enumerate(rounds):
            some = pending[number] if number < len(pending) else PendingGradients(torch.float32)
            for bucket in buckets:
                gradients = some.take([member.parameter for member in bucket.members])
                with self._local.transfer.aside(ready):
                    self.reduce(bucket, gradients, summed)

    def reduce(self, bucket: Bucket, gradients: dict[int, Tensor], sums: bool) -> None:
        """Reduce one bucket, in a job. ``sums``: some of the gradients, of any rank, may be sums, which their
        parameter's dtype may not hold."""
        dtype = self._ownership.dtypes[bucket.members[0].parameter]
        if sums:  # one that holds both, so that no bit depends on who else brings a sum
            dtype = torch.promote_types(dtype, self._settings.sum_dtype)
        dtype, collectives = self._settings.wire_dtype or dtype, self._ownership.averaging_collectives
        reduced = reduce_shard(collectives, bucket, gradients, dtype, self._settings.predivide)
        for owned, values in self._ownership.spread(bucket, reduced):
            self._local.arrive(owned.index, values)


def reduce_shard(
    collectives: CollectiveThread,
    bucket: Bucket,
    gradients: dict[int, Tensor],
    dtype: torch.dtype,
    predivide: float,
) -> list[tuple[ShardRange, Tensor]]:
    """Run the bucket's reduction together with all other ranks.

    Args:
        collectives: this is one of its jobs.
        bucket: what is reduced.
        gradients: flat, by parameter; those that this rank has. Let go of as they are sent.
        dtype: in which gradients travel, the same on all ranks.
        predivide: of :class:`ReductionSettings`.

    Returns:
        This rank's ranges that any rank has a gradient of, each with the mean: float32, flat.
    """
    world_size = collectives.world_size
    device = next((gradient.device for gradient in gradients.values()), collectives.device)
    has = set(gradients)
    last = _last_ends(bucket)
    used: dict[int, tuple[ShardRange, Tensor]] = {}
    for start, numel in slices(bucket.shard_numel, world_size, SLICE_NUMEL):
        by_rank = [slice_entries(ranges, start, numel) for ranges in bucket.ranges]
        slice_bytes = numel * dtype.itemsize
        part_bytes = -(-(slice_bytes + max(map(len, by_rank))) // _ALIGNMENT) * _ALIGNMENT
        outgoing = collectives.outgoing(world_size * part_bytes, device)
        for part, entries in zip(outgoing.memory.view(world_size, part_bytes), by_rank, strict=True):
            _pack(part[:slice_bytes].view(dtype), entries, gradients, 1.0 / predivide)
            flags = torch.tensor([entry.owned.parameter in has for entry in entries], dtype=torch.uint8)
            part[slice_bytes : slice_bytes + len(entries)].copy_(flags)
        for parameter in [parameter for parameter in gradients if last[parameter] <= start + numel]:
            del gradients[parameter]
        received = collectives.exchange(outgoing)
        own = by_rank[collectives.rank]
        flags = torch.stack([part[slice_bytes : slice_bytes + len(own)] for part in received]).cpu().bool()
        for position, entry in enumerate(own):
            arrays = [
                part[:slice_bytes].view(dtype)[entry.in_slice]
                for part, flag in zip(received, flags[:, position], strict=True)
                if flag
            ]
            if arrays:
                if entry.owned.index not in used:
                    values = torch.empty(entry.owned.numel, dtype=torch.float32, device=device)
                    used[entry.owned.index] = (entry.owned, values)
                add_up(used[entry.owned.index][1][entry.in_range], arrays, predivide / world_size)
    return list(used.values())


def _last_ends(bucket: Bucket) -> dict[int, int]:
    """For each parameter, where in a shard its last element ends, over all ranks."""
    last = {member.parameter: 0 for member in bucket.members}  # none at all, in a part of tensor parallelism
    for ranges in bucket.ranges:
        for owned in ranges:
            last[owned.parameter] = max(last[owned.parameter], owned.shard_offset + owned.numel)
    return last


def _pack(target: Tensor, entries: Sequence[SliceEntry], gradients: Mapping[int, Tensor], factor: float) -> None:
    for entry in entries:
        gradient = gradients.get(entry.owned.parameter)
        if gradient is not None:
            place = target[entry.in_slice]
            place.copy_(gradient[entry.in_parameter])
            if factor != 1.0:
                place.mul_(factor)


def add_up(target: Tensor, arrays: Sequence[Tensor], factor: float) -> None:
    """``target`` = the sum in float32, in order, times ``factor``."""
    numel = target.numel()
    block_numel = _BLOCK_NUMEL if target.device.type == "cpu" else max(1, numel)
    # Adding another dtype in place is several times slower on a CPU than converting it first.
    scratch = torch.empty(min(block_numel, numel), dtype=torch.float32, device=target.device)
    for start in range(0, numel, block_numel):
        block = target[start : start + block_numel]
        block.copy_(arrays[0][start : start + block_numel])
        for array in arrays[1:]:
            addend = array[start : start + block_numel]
            block.add_(addend if addend.dtype == torch.float32 else scratch[: len(addend)].copy_(addend))
        if factor != 1.0:
            block.mul_(factor)

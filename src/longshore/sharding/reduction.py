"""Reducing gradients bucket by bucket, on the collective thread.

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

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from longshore.host import HostStore
from longshore.sharding.agreement import Action, Statement, agree_on
from longshore.sharding.collective_thread import CollectiveThread
from longshore.sharding.layout import Bucket, ShardRange
from longshore.sharding.ownership import Ownership, SliceEntry, slice_entries, slices
from longshore.sharding.rounds import PendingGradients, ReductionSettings, Round

_ALIGNMENT = 64
SLICE_NUMEL = 1 << 22
"""Elements of one slice over all ranks."""
_BLOCK_NUMEL = 1 << 17
"""Elements that a CPU adds up at a time, while they are in its cache."""


class Reducer:
    """Runs rounds on the collective thread: mean gradients of the owned shard ranges arrive in ``local``."""

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

        def meet() -> None:
            self._collectives.meet(Action.BACKWARD, current.number, window)
            summed = agree_on(self._collectives.rows, Statement([some.summed for some in pending])).deferred
            self.reduce_pending(pending, summed, buckets, ready)

        self._open(current, meet)

    def begin_last(self, closing: Round, sums: bool) -> None:
        """Queue the meeting that opens the round of the last backward; ``sums``: this rank may bring some."""

        def meet() -> None:
            if self._collectives.meet(Action.CLOSE, closing.number, self._ownership.window.number):
                closing.sums = any(agree_on(self._collectives.rows, Statement([sums])).deferred)
            else:
                closing.failed = True  # another rank is at its step already, and this one will be

        self._open(closing, meet)

    def _open(self, current: Round, meet: Callable[[], None]) -> None:
        def job() -> None:
            try:
                meet()
            except BaseException:
                current.failed = True
                raise

        self._collectives.submit(job)

    def launch(self, current: Round, bucket: Bucket, gradients: dict[int, Tensor]) -> None:
        """Queue the reduction of one bucket of a round."""
        ready = self._local.transfer.mark()
        # Where gradients stay anyway, nobody waits for memory.
        waiting_bytes = 0 if current.lends else sum(gradient.nbytes for gradient in gradients.values())

        def reduce() -> None:
            if not current.failed:
                with self._local.transfer.aside(ready):
                    self.reduce(bucket, gradients, current.sums)
            gradients.clear()  # also where the round did not take place

        self._collectives.submit(reduce, waiting_bytes)

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
        parameter's dtype may not be able to represent."""
        dtype = self._ownership.dtypes[bucket.members[0].parameter]
        if sums:  # one that can represent both, so that no bit depends on who else brings a sum
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
    # Where in a shard each parameter's last element ends, over all ranks; none at all in a part of tensor parallelism.
    last = {member.parameter: 0 for member in bucket.members}
    for owned in itertools.chain(*bucket.ranges):
        last[owned.parameter] = max(last[owned.parameter], owned.shard_offset + owned.numel)
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

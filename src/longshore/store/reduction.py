"""Reduction of the gradients of one bucket, on the collective thread.

Every rank sends to each other rank that rank's shard of a bucket, and adds up its own shard. Gradients are sent in
their own dtype and are added in float32, rank by rank in order. That costs the bytes of a reduce-scatter in the
gradients' dtype, and gives the bits of one in float32, the same in every run.

A bucket is sent in slices; a slice is the same range of every rank's shard. So the buffers are small, stay allocated
and, on the CPU, stay in the cache; and a gradient is freed as soon as its last slice is packed.

With the first slice each rank says for which parameters it has gradients. So a range for which no rank has a gradient
is not an arrival, and zeros of ranks without a gradient are not added.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longshore.layout.divisions import Bucket
from longshore.layout.tiles import Range
from longshore.ranks.collective_thread import CollectiveThread
from longshore.store.agreement import as_flags, as_words
from longshore.store.ownership import SliceEntry, slice_entries, slices

SLICE_NUMEL = 1 << 22
"""Elements of a slice over all ranks, on the CPU."""
DEVICE_SLICE_NUMEL = 1 << 26
"""Elements of a slice on an accelerator, where each costs launches, and no cache is large enough."""
_BLOCK_NUMEL = 1 << 17  # elements that a CPU adds up at a time, so that they stay in its cache


@dataclass(frozen=True)
class ReductionSettings:
    """Settings of how gradients of several ranks are reduced.

    Attributes:
        stage: ZeRO stage, 0, 1, 2 or 3.
        reduced_numel: number of elements that may wait to be reduced together.
        early: launch buckets during backward; if they are reduced once a window, during the backward that is known to
            be the last.
        wire_dtype: dtype in which gradients are sent; None: their own.
        sum_dtype: dtype of sums on the device before a reduction.
        predivide: divides gradients before they are added (against overflow in float16); the rest of the mean is
            divided out afterwards.
    """

    stage: int
    reduced_numel: int
    early: bool = True
    wire_dtype: torch.dtype | None = None
    sum_dtype: torch.dtype = torch.float32
    predivide: float = 1.0

    @property
    def each_backward(self) -> bool:
        """Whether gradients are reduced after every backward; otherwise sums stay on the device, and are reduced once
        for each window."""
        return self.stage >= 2

    @property
    def bucket_numel(self) -> int:
        """Elements of one bucket. During backward one bucket fills while another is reduced; together they have
        ``reduced_numel`` elements."""
        return max(1, self.reduced_numel // 2) if self.early and self.each_backward else self.reduced_numel


def reduce_shard(
    collectives: CollectiveThread,
    bucket: Bucket,
    gradients: dict[int, Tensor],
    dtype: torch.dtype,
    predivide: float,
    read: Callable[[Tensor], None] = lambda gradient: None,
) -> list[tuple[Range, Tensor]]:
    """Reduce a bucket together with all other ranks, in a job of ``collectives``.

    ``gradients`` are this rank's, flat, by parameter. They are sent in ``dtype``, the same on all ranks, and removed
    from the dictionary as they are sent; ``read`` is called with each before it is let go of. Returns the ranges of
    this rank for which any rank has a gradient, each with the mean: float32, flat.
    """
    data, world_size = collectives.data, collectives.world_size
    slice_numel = SLICE_NUMEL if data.device.type == "cpu" else DEVICE_SLICE_NUMEL
    has = as_words([member.parameter in gradients for member in bucket.members])
    has_by_rank: list[set[int]] = []
    # The last offset in a shard, over all ranks, at which each parameter ends; 0 if none of these ranks has a range of
    # it, as may happen with tensor parallelism.
    last = {member.parameter: 0 for member in bucket.members}
    for owned in itertools.chain(*bucket.ranges):
        last[owned.parameter] = max(last[owned.parameter], owned.shard_offset + owned.numel)
    used: dict[int, tuple[Range, Tensor]] = {}
    for start, numel in slices(bucket.shard_numel, world_size, slice_numel):
        by_rank = [slice_entries(ranges, start, numel) for ranges in bucket.ranges]
        outgoing = data.outgoing(world_size * numel * dtype.itemsize)
        for part, entries in zip(outgoing.memory.view(dtype).view(world_size, numel), by_rank, strict=True):
            _pack(part, entries, gradients, 1.0 / predivide)
        for parameter in [parameter for parameter in gradients if last[parameter] <= start + numel]:
            read(gradients.pop(parameter))
        if not has_by_rank:
            for row in data.tell(outgoing, has).tolist():
                flags = as_flags(row, len(bucket.members))
                has_by_rank.append({each.parameter for each, flag in zip(bucket.members, flags, strict=True) if flag})
        if not any(has_by_rank):
            break
        received = [part.view(dtype) for part in data.exchange(outgoing)]
        for entry in by_rank[collectives.rank]:
            parameter = entry.owned.parameter
            arrays = [
                part[entry.in_slice] for part, theirs in zip(received, has_by_rank, strict=True) if parameter in theirs
            ]
            if arrays:
                if entry.owned.key not in used:
                    values = torch.empty(entry.owned.numel, dtype=torch.float32, device=data.device)
                    used[entry.owned.key] = (entry.owned, values)
                add_up(used[entry.owned.key][1][entry.in_range], arrays, predivide / world_size)
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
    """Set ``target`` to the sum of ``arrays``, added in order in float32, times ``factor``."""
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

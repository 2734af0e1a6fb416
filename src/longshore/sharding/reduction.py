"""Reduction of the gradients of one bucket, on the collective thread.

Every rank sends to each other rank that rank's shard of a bucket, and adds up its own shard. Gradients are sent in
their own dtype and are added in float32, rank by rank in order. That costs the bytes of a reduce-scatter in the
gradients' dtype, and gives the bits of one in float32, the same in every run.

A bucket is sent in slices; a slice is the same range of every rank's shard. So the buffers are small, stay allocated
and stay in the cache, and a gradient is freed as soon as its last slice is packed.

After the slice, each message has one byte for each shard range in it: whether the sender has a gradient of that
parameter. So a range for which no rank has a gradient is not an arrival, and zeros of ranks without a gradient are not
added.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longshore.sharding.collective_thread import CollectiveThread
from longshore.sharding.layout import Bucket, ShardRange
from longshore.sharding.ownership import SliceEntry, slice_entries, slices

_ALIGNMENT = 64
SLICE_NUMEL = 1 << 22  # elements over all ranks
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
    collectives: CollectiveThread, bucket: Bucket, gradients: dict[int, Tensor], dtype: torch.dtype, predivide: float
) -> list[tuple[ShardRange, Tensor]]:
    """Reduce a bucket together with all other ranks, in a job of ``collectives``.

    ``gradients`` are this rank's, flat, by parameter. They are sent in ``dtype``, the same on all ranks, and removed
    from the dictionary as they are sent. Returns the ranges of this rank for which any rank has a gradient, each with
    the mean: float32, flat.
    """
    world_size = collectives.world_size
    device = next((gradient.device for gradient in gradients.values()), collectives.device)
    has = set(gradients)
    # The last offset in a shard, over all ranks, at which each parameter ends; 0 if none of these ranks has a range of
    # it, as may happen with tensor parallelism.
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

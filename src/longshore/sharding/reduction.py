"""Reducing one bucket: every rank sends each other rank its shard, and each adds up its own.

The gradients travel in their own dtype and are added in float32, rank by rank
in order. That costs the bytes of a reduce-scatter in the gradients' dtype, and
gives the bits of one in float32, the same in every run.

A bucket goes in slices: a slice is the same range of every rank's shard. So
the buffers are small, stay allocated, and are warm in the cache; and a gradient
is let go of as soon as its last slice is packed.

Each chunk carries, behind its slice, one byte for each of its pieces: whether
its sender has a gradient of that parameter. So a piece that nobody used is not
an arrival, and one that only some used is not touched by the others' zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longshore.sharding.bucket import Bucket, Piece
from longshore.sharding.lane import CollectiveLane

_CHUNK_ALIGNMENT = 64
SLICE_NUMEL = 1 << 22
"""Elements of one slice over all ranks."""
_BLOCK_NUMEL = 1 << 17
"""Elements that a CPU adds up at a time, while they are in its cache."""


class Averaging(NamedTuple):
    """The mean over the ranks, as two factors: ``before`` the sum and ``after`` it."""

    before: float
    after: float

    @classmethod
    def over(cls, world_size: int, predivide: float = 1.0) -> Averaging:
        """``predivide`` divides before the sum (against overflow in float16), the rest after it."""
        return cls(1.0 / predivide, predivide / world_size)


class Part(NamedTuple):
    """The part of a piece that lies in a slice: where in the slice, in the piece and in the parameter."""

    piece: Piece
    in_slice: slice
    in_piece: slice
    in_parameter: slice


def slices(shard_numel: int, world_size: int, most: int) -> Iterator[tuple[int, int]]:
    """``(start, numel)`` of consecutive slices of a shard, of at most ``most`` elements over all ranks."""
    step = max(1, most // world_size)
    for start in range(0, shard_numel, step):
        yield start, min(step, shard_numel - start)


def parts(pieces: Sequence[Piece], start: int, numel: int) -> list[Part]:
    """What of the pieces lies in elements ``[start, start + numel)`` of their shard."""
    found = []
    for piece in pieces:
        first, last = max(piece.shard_offset, start), min(piece.shard_offset + piece.numel, start + numel)
        if first < last:
            inside = slice(first - piece.shard_offset, last - piece.shard_offset)
            whole = slice(piece.parameter_offset + inside.start, piece.parameter_offset + inside.stop)
            found.append(Part(piece, slice(first - start, last - start), inside, whole))
    return found


def reduce_shard(
    lane: CollectiveLane, bucket: Bucket, gradients: dict[int, Tensor], dtype: torch.dtype, averaging: Averaging
) -> list[tuple[Piece, Tensor]]:
    """Run the bucket's reduction together with all other ranks.

    Args:
        lane: this is one of its jobs.
        bucket: what is reduced.
        gradients: flat, by parameter; those that this rank has. Let go of as they are sent.
        dtype: in which gradients travel, the same on all ranks.
        averaging: how the sum becomes a mean.

    Returns:
        This rank's pieces that any rank has a gradient of, each with the mean: float32, flat.
    """
    device = next((gradient.device for gradient in gradients.values()), lane.device)
    has = set(gradients)
    last = _last_starts(bucket)
    used: dict[int, tuple[Piece, Tensor]] = {}
    for start, numel in slices(bucket.shard_numel, lane.world_size, SLICE_NUMEL):
        by_rank = [parts(pieces, start, numel) for pieces in bucket.pieces]
        slice_bytes = numel * dtype.itemsize
        chunk_bytes = -(-(slice_bytes + max(map(len, by_rank))) // _CHUNK_ALIGNMENT) * _CHUNK_ALIGNMENT
        outgoing = lane.outgoing(lane.world_size * chunk_bytes, device)
        for chunk, entries in zip(outgoing.memory.view(lane.world_size, chunk_bytes), by_rank, strict=True):
            _pack(chunk[:slice_bytes].view(dtype), entries, gradients, averaging.before)
            flags = torch.tensor([entry.piece.parameter in has for entry in entries], dtype=torch.uint8)
            chunk[slice_bytes : slice_bytes + len(entries)].copy_(flags)
        for parameter in [parameter for parameter in gradients if last[parameter] < start + numel]:
            del gradients[parameter]
        received = lane.exchange(outgoing)
        own = by_rank[lane.rank]
        flags = torch.stack([chunk[slice_bytes : slice_bytes + len(own)] for chunk in received]).cpu().bool()
        for position, entry in enumerate(own):
            arrays = [
                chunk[:slice_bytes].view(dtype)[entry.in_slice]
                for chunk, flag in zip(received, flags[:, position], strict=True)
                if flag
            ]
            if arrays:
                empty = torch.empty(0, device=device)
                _, values = used.get(entry.piece.index, (entry.piece, empty))
                if values is empty:
                    values = torch.empty(entry.piece.numel, dtype=torch.float32, device=device)
                    used[entry.piece.index] = (entry.piece, values)
                add_up(values[entry.in_piece], arrays, averaging.after)
    return list(used.values())


def _last_starts(bucket: Bucket) -> dict[int, int]:
    """For each parameter, where in a shard its last element lies, over all ranks."""
    last = {member.parameter: 0 for member in bucket.members}  # none at all, in a part of tensor parallelism
    for pieces in bucket.pieces:
        for piece in pieces:
            end = piece.shard_offset + piece.numel - 1
            last[piece.parameter] = max(last[piece.parameter], end)
    return last


def _pack(target: Tensor, entries: Sequence[Part], gradients: Mapping[int, Tensor], factor: float) -> None:
    for entry in entries:
        gradient = gradients.get(entry.piece.parameter)
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

"""Reducing one bucket: every rank sends each other rank its shard, and each adds up its own.

The gradients travel in their own dtype and are added in float32, rank by rank
in order. That costs the bytes of a reduce-scatter in the gradients' dtype, and
gives the bits of one in float32, the same in every run.

Each chunk carries, behind the shard, one byte for each of its pieces: whether
its sender has a gradient of that parameter. So a piece that nobody used is not
an arrival, and one that only some used is not touched by the others' zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longshore.sharding.bucket import Bucket, Piece
from longshore.sharding.lane import CollectiveLane

_CHUNK_ALIGNMENT = 64


class ReducedShard(NamedTuple):
    """One rank's shard of a bucket after a round.

    ``values`` is float32 ``[shard_numel]``, meaningless where no piece was used;
    ``used`` says of each of the rank's pieces whether any rank had a gradient.
    """

    values: Tensor
    used: list[bool]


class Averaging(NamedTuple):
    """The mean over the ranks, as two factors: ``before`` the sum and ``after`` it."""

    before: float
    after: float

    @classmethod
    def over(cls, world_size: int, predivide: float = 1.0) -> Averaging:
        """``predivide`` divides before the sum (against overflow in float16), the rest after it."""
        return cls(1.0 / predivide, predivide / world_size)


def reduce_shard(
    lane: CollectiveLane, bucket: Bucket, gradients: Mapping[int, Tensor], dtype: torch.dtype, averaging: Averaging
) -> ReducedShard:
    """Run the bucket's reduction together with all other ranks.

    Args:
        lane: this is one of its jobs.
        bucket: what is reduced.
        gradients: flat, by parameter; those that this rank has.
        dtype: in which gradients travel, the same on all ranks.
        averaging: how the sum becomes a mean.
    """
    device = next(iter(gradients.values())).device if gradients else lane.device
    shard_bytes = bucket.shard_numel * dtype.itemsize
    chunk_bytes = -(-(shard_bytes + max(map(len, bucket.pieces))) // _CHUNK_ALIGNMENT) * _CHUNK_ALIGNMENT
    chunks = torch.empty((lane.world_size, chunk_bytes), dtype=torch.uint8, device=device)
    for rank, pieces in enumerate(bucket.pieces):
        _pack(chunks[rank], pieces, gradients, dtype, bucket.shard_numel)
    if averaging.before != 1.0:
        chunks[:, :shard_bytes].view(dtype).mul_(averaging.before)
    received = lane.exchange(chunks)
    del chunks
    own = bucket.pieces[lane.rank]
    flags = received[:, shard_bytes : shard_bytes + len(own)].cpu().bool()
    arrays = [received[rank, :shard_bytes].view(dtype) for rank in range(lane.world_size)]
    values = torch.empty(bucket.shard_numel, dtype=torch.float32, device=device)
    if bool(flags.all()):
        _add_up(values, arrays)
    else:
        for position, piece in enumerate(own):
            part = slice(piece.shard_offset, piece.shard_offset + piece.numel)
            _add_up(values[part], [array[part] for array, used in zip(arrays, flags[:, position], strict=True) if used])
    if averaging.after != 1.0:
        values.mul_(averaging.after)
    return ReducedShard(values, flags.any(dim=0).tolist())


def _pack(
    chunk: Tensor, pieces: Sequence[Piece], gradients: Mapping[int, Tensor], dtype: torch.dtype, shard_numel: int
) -> None:
    shard = chunk[: shard_numel * dtype.itemsize].view(dtype)
    flags = []
    for piece in pieces:
        gradient = gradients.get(piece.parameter)
        flags.append(gradient is not None)
        if gradient is not None:
            source = gradient[piece.parameter_offset : piece.parameter_offset + piece.numel]
            shard[piece.shard_offset : piece.shard_offset + piece.numel].copy_(source)
    flag_bytes = torch.tensor(flags, dtype=torch.uint8)
    chunk[shard_numel * dtype.itemsize :][: len(flags)].copy_(flag_bytes)


def _add_up(target: Tensor, arrays: Sequence[Tensor]) -> None:
    """``target`` = the sum in float32, in order; nothing where nobody has anything."""
    for position, array in enumerate(arrays):
        if position == 0:
            target.copy_(array)
        else:
            target.add_(array)

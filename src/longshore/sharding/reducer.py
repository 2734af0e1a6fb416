"""Buckets on their way through the lane: what the ranks have of one becomes arrivals in a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longshore.host import HostStore
from longshore.sharding.bucket import Bucket
from longshore.sharding.contributions import Contributions
from longshore.sharding.reduction import Averaging, reduce_shard
from longshore.sharding.shards import Shards
from longshore.sharding.window import ReductionSettings


class Reducer:
    """Runs reductions; in jobs of the lane.

    Args:
        inner: where gradients of owned pieces arrive.
        shards: the buckets, and who owns what.
        settings: dtypes and factors.
    """

    def __init__(self, inner: HostStore, shards: Shards, settings: ReductionSettings) -> None:
        self._inner = inner
        self._shards = shards
        self._settings = settings
        self._lane = shards.ownership.averaging_lane
        self._averaging = Averaging.over(self._lane.world_size, settings.predivide)

    def reduce_kept(
        self, kept: list[Contributions], rounds: Sequence[bool], buckets: Sequence[Bucket], ready: Any
    ) -> None:
        """Run agreed rounds on what was kept; ``rounds`` says of each whether any rank brings sums."""
        for number, summed in enumerate(rounds):
            contributions = kept[number] if number < len(kept) else Contributions(torch.float32)
            for bucket in buckets:
                gradients = contributions.take([member.parameter for member in bucket.members])
                with self._inner.transfer.aside(ready):
                    self.reduce(bucket, gradients, summed)

    def reduce(self, bucket: Bucket, gradients: dict[int, Tensor], sums: bool) -> None:
        """``sums``: some of the gradients, of any rank, may be sums, which their parameter's dtype may not hold."""
        dtype = self._shards.dtype_of(bucket)
        if sums:  # one that holds both, so that no bit depends on who else brings a sum
            dtype = torch.promote_types(dtype, self._settings.sum_dtype)
        reduced = reduce_shard(self._lane, bucket, gradients, self._settings.wire_dtype or dtype, self._averaging)
        for piece, values in self._shards.ownership.arrivals(bucket, reduced):
            self._inner.arrive(piece.index, values)

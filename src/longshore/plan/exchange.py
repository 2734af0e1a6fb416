"""What ranks of one host without devices take to reduce gradients and to publish parameters: measured with threads in
place of ranks, by the engine's own additions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch

from longshore.plan.together import Together
from longshore.sharding.reduction import SLICE_NUMEL, add_up, slices

Clock = Callable[[], float]


class Exchange(NamedTuple):
    """Bytes a second that each rank has for others, while all have."""

    reduce_bytes_per_s: float
    """Written where the others read them, and theirs added up."""
    gather_bytes_per_s: float
    """Written, and copied to where they are used."""
    unshard_bytes_per_s: float
    """Copied into memory that is taken for it, as FSDP2 does with what it gathered."""


class ExchangeProbe:
    """Memory that is taken once, to measure in as often as somebody wants to know.

    Args:
        dtype: of gradients and parameters.
        ranks: two or more, of one host.
        numel: elements of the gradients of a rank: more than caches hold.
        clock: seconds.
    """

    def __init__(self, dtype: torch.dtype, ranks: int, numel: int, clock: Clock = time.perf_counter) -> None:
        self._ranks = ranks
        self._clock = clock
        self._together = Together(ranks)
        count = self._together.count
        self._shard_numel = max(1, numel // ranks)
        self._gradients = [torch.full((ranks, self._shard_numel), 1e-3, dtype=dtype) for _ in range(count)]
        self._parameters = [torch.zeros_like(each) for each in self._gradients]
        # Each rank's: what it sends in a slice, and what it publishes.
        step = max(1, min(self._shard_numel, SLICE_NUMEL // ranks))
        self._sent = [torch.zeros(ranks, step, dtype=dtype) for _ in range(ranks)]
        self._published = [torch.zeros(self._shard_numel, dtype=dtype) for _ in range(ranks)]
        self._together.run(self._round)  # touches all of it

    def measure(self, rounds: int) -> Exchange:
        """Medians of so many rounds, in each of which the slowest rank counts."""
        slowest = [[max(each) for each in zip(*self._together.run(self._round), strict=True)] for _ in range(rounds)]
        reduce, gather, unshard = (
            self._together.turns * statistics.median(each) for each in zip(*slowest, strict=True)
        )
        whole = self._parameters[0].nbytes
        sent = whole * (self._ranks - 1) / self._ranks
        return Exchange(sent / reduce, sent / gather, whole / unshard)

    def _round(self, rank: int) -> tuple[float, float, float]:
        """Seconds of the three."""
        parameters, times = self._parameters[rank], [self._clock()]
        self._reduce(rank)
        times.append(self._clock())
        self._published[rank].copy_(parameters[rank])
        for other, values in enumerate(self._published):
            if other != rank:
                parameters[other].copy_(values)
        times.append(self._clock())
        torch.empty_like(parameters).copy_(parameters)
        times.append(self._clock())
        reduce, gather, unshard = (end - begin for begin, end in pairwise(times))
        return reduce, gather, unshard

    def _reduce(self, rank: int) -> None:
        mean = torch.empty(self._shard_numel, dtype=torch.float32)
        for start, numel in slices(self._shard_numel, self._ranks, SLICE_NUMEL):
            self._sent[rank][:, :numel].copy_(self._gradients[rank][:, start : start + numel])
            add_up(mean[start : start + numel], [sent[rank, :numel] for sent in self._sent], 1.0 / self._ranks)

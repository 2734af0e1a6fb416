"""What ranks of one host without devices take to reduce gradients and to publish parameters: measured with threads in
place of ranks, by the engine's own additions."""

from __future__ import annotations

import mmap
import statistics
import time
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from longshore.plan.probe import Clock
from longshore.plan.together import Together
from longshore.sharding.bucket import slices
from longshore.sharding.reduction import SLICE_NUMEL, add_up


class Exchange(NamedTuple):
    """Bytes a second that each rank has for others, while all have."""

    reduce_bytes_per_s: float
    """Written where the others read them, and theirs added up."""
    gather_bytes_per_s: float
    """Written, and copied to where they are used."""
    unshard_bytes_per_s: float
    """Of whole parameters: copied into memory that is taken for them, as FSDP2 does with what it gathered."""


class ExchangeProbe:
    """Memory that is taken once, to measure in as often as somebody wants to know.

    Args:
        dtype: of gradients and parameters.
        ranks: two or more, of one host.
        numel: elements of the gradients of all that run at once: more than caches hold.
        together: runs them.
        clock: seconds.
    """

    def __init__(
        self, dtype: torch.dtype, ranks: int, numel: int, together: Together, clock: Clock = time.perf_counter
    ) -> None:
        self._ranks = ranks
        self._clock = clock
        self._together = together
        self._shard_numel = max(1, numel // together.count // ranks)
        self._gradients = [torch.full((ranks, self._shard_numel), 1e-3, dtype=dtype) for _ in range(together.count)]
        self._parameters = [torch.zeros_like(each) for each in self._gradients]
        # Each rank's: what it sends in a slice, and what it publishes.
        step = max(1, min(self._shard_numel, SLICE_NUMEL // ranks))
        self._sent = [torch.zeros(ranks, step, dtype=dtype) for _ in range(ranks)]
        self._published = [torch.zeros(self._shard_numel, dtype=dtype) for _ in range(ranks)]
        together.run(self._round)  # touches all of it

    def measure(self, rounds: int) -> Exchange:
        """Medians of so many rounds, in each of which the slowest rank counts."""
        slowest = [[max(each) for each in zip(*self._together.run(self._round), strict=True)] for _ in range(rounds)]
        turns, whole = self._together.turns, self._parameters[0].nbytes
        reduce, gather, unshard = (turns * statistics.median(each) for each in zip(*slowest, strict=True))
        sent = whole * (self._ranks - 1) / self._ranks
        return Exchange(sent / reduce, sent / gather, whole / unshard)

    def _round(self, rank: int) -> tuple[float, float, float]:
        """Seconds of the three."""
        times = [self._clock()]
        for work in (self.reduce, self.gather, self.unshard):
            work(rank)
            times.append(self._clock())
        reduce, gather, unshard = (end - begin for begin, end in pairwise(times))
        return reduce, gather, unshard

    def reduce(self, rank: int) -> Tensor:
        """The mean of all ranks' gradients, of this one's shard."""
        mean = _taken_anew(self._shard_numel, torch.float32)
        for start, numel in slices(self._shard_numel, self._ranks, SLICE_NUMEL):
            self._sent[rank][:, :numel].copy_(self._gradients[rank][:, start : start + numel])
            add_up(mean[start : start + numel], [sent[rank, :numel] for sent in self._sent], 1.0 / self._ranks)
        return mean

    def gather(self, rank: int) -> Tensor:
        """The parameters, of which each rank has published its shard."""
        parameters = self._parameters[rank]
        self._published[rank].copy_(parameters[rank])
        for other, values in enumerate(self._published):
            if other != rank:
                parameters[other].copy_(values)
        return parameters

    def unshard(self, rank: int) -> Tensor:
        """A copy of them in memory of its own."""
        parameters = self._parameters[rank]
        return _taken_anew(parameters.numel(), parameters.dtype).view(parameters.shape).copy_(parameters)


def _taken_anew(numel: int, dtype: torch.dtype) -> Tensor:
    """From the system, as what a step lets go of is for the next one; malloc may have kept some by chance."""
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE), dtype=dtype)

"""What one rank stores of a model. The engine's own layout functions compute it, and nothing is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from longshore.host.backend import kept_on_device
from longshore.layout import TileRun, tile_runs
from longshore.optim.offload import default_tile_numel
from longshore.plan.job import Job, PlanChoice
from longshore.plan.model import PlannedModel
from longshore.sharding.layout import chunk, fill_buckets, shard_numel_of, shard_parts
from longshore.sharding.reduction import ReductionSettings

_MOST_RANGES = 50_000
"""At stage 0 every rank steps the ranges of all shards; beyond so many, the padding between them is not counted."""


class OwnedRange(NamedTuple):
    """A range of one parameter that this rank steps."""

    parameter: int  # index among the trainable parameters
    numel: int
    dtype: torch.dtype
    bucket: int | None  # index of the bucket that reduces its gradient; None: nothing is reduced


class PlannedBucket(NamedTuple):
    """Gradients that are reduced together."""

    parameters: tuple[int, ...]
    numel: int
    shard_numel: int
    dtype: torch.dtype


class TileGroup(NamedTuple):
    """Consecutive tiles of one size and dtype."""

    run: TileRun  # its parameters are indices into RankLayout.owned
    dtype: torch.dtype
    gradient_dtype: torch.dtype


@dataclass(frozen=True)
class RankLayout:
    """The layout of one rank; the first five fields are what it was made from."""

    model: PlannedModel  # with parameters in the job's dtype
    job: Job
    choice: PlanChoice
    ranks: int
    staged: bool
    owned: tuple[OwnedRange, ...]  # what the rank steps, in the order of its tiles
    buckets: tuple[PlannedBucket, ...]  # in the order in which backward launches them; none on one rank
    host: tuple[TileGroup, ...]  # tiles of the store on the host, or of the only store
    device: tuple[TileGroup, ...]  # tiles whose state stays on the device
    numels: tuple[int, ...]  # elements of each trainable parameter in this rank's model

    @property
    def reduces_each_backward(self) -> bool:
        """Whether several ranks reduce in every backward of a step, and not only in the last one."""
        settings = ReductionSettings(self.choice.stage, self.job.bucket_numel)
        return self.ranks > 1 and settings.each_backward


def lay_out(model: PlannedModel, job: Job, choice: PlanChoice, ranks: int, staged: bool, rank: int = 0) -> RankLayout:
    """The layout of one rank. Rank 0 stores the most, except for padding.

    Args:
        model: in its own dtypes; the job's dtype is applied here.
        job: gives the sizes of buckets and tiles.
        choice: gives the stage and where state is.
        ranks: number of ranks that share the model.
        staged: whether parameters are on a device with its own memory.
        rank: whose layout.
    """
    model = model.cast(job.dtype)
    numels = [each.numel for each in model.trainable]
    if choice.stage == 3 and ranks > 1:
        rows = [chunk(each.shape[0], ranks, rank) for each in model.trainable]
        numels = [
            (end - first) * (each.numel // max(1, each.shape[0]))
            for each, (first, end) in zip(model.trainable, rows, strict=True)
        ]
    owned = [OwnedRange(index, each.numel, each.dtype, None) for index, each in enumerate(model.trainable)]
    buckets: list[PlannedBucket] = []
    if ranks > 1:
        owned, buckets = _sharded(model, job.bucket_numel, choice.stage, (ranks, rank), numels)
    moves = staged and choice.offload == "cpu"
    kept = [0] * len(owned)
    if moves and choice.ratio != 1.0:
        kept = kept_on_device([each.numel for each in owned], choice.ratio)
    gradient_dtype = None if ranks == 1 else torch.float32
    on_host = [(index, each.numel - kept[index], each.dtype) for index, each in enumerate(owned)]
    on_device = [(index, kept[index], each.dtype) for index, each in enumerate(owned)]
    host = _tiles(on_host, job.tile_numel or default_tile_numel(moves), gradient_dtype)
    device = _tiles(on_device, job.tile_numel or default_tile_numel(False), gradient_dtype)
    if staged and choice.offload == "none":
        host, device = (), host
    return RankLayout(model, job, choice, ranks, staged, tuple(owned), tuple(buckets), host, device, tuple(numels))


def _sharded(
    model: PlannedModel, bucket_numel: int, stage: int, place: tuple[int, int], numels: Sequence[int]
) -> tuple[list[OwnedRange], list[PlannedBucket]]:
    """Ranges and buckets where several ranks reduce; ``place`` is the number of ranks and the rank."""
    ranks, rank = place
    # At stage 3, a bucket has parameters of one unit.
    keyed = [
        (index, each.numel, (each.dtype, each.unit) if stage == 3 else each.dtype)
        for index, each in enumerate(model.trainable)
    ]
    filled = fill_buckets(keyed, ReductionSettings(stage, bucket_numel).bucket_numel)
    owned: list[OwnedRange] = []
    buckets: list[PlannedBucket] = []
    for bucket, members in enumerate(filled):
        dtype = model.trainable[members[0][0]].dtype
        if stage == 3:
            ranges = [(index, numels[index]) for index, _ in members if numels[index] > 0]
            shard_numel = sum(numel for _, numel in ranges)
        else:
            shard_numel = shard_numel_of(members, ranks)
            shards = range(ranks) if stage == 0 else (rank,)
            ranges = members
            if stage > 0 or ranks * len(filled) <= _MOST_RANGES:
                ranges = [(part[0], part[2]) for each in shards for part in shard_parts(members, shard_numel, each)]
        owned += [OwnedRange(index, numel, dtype, bucket) for index, numel in ranges]
        numel = sum(numel for _, numel in members)
        buckets.append(PlannedBucket(tuple(index for index, _ in members), numel, shard_numel, dtype))
    return owned[::-1], buckets  # the engine gives shards to its store in this order


def _tiles(
    ranges: Sequence[tuple[int, int, torch.dtype]], tile_numel: int, gradient_dtype: torch.dtype | None
) -> tuple[TileGroup, ...]:
    by_dtype: dict[torch.dtype, list[tuple[int, int]]] = {}
    for index, numel, dtype in ranges:
        if numel > 0:
            by_dtype.setdefault(dtype, []).append((index, numel))
    return tuple(
        TileGroup(run, dtype, gradient_dtype or dtype)
        for dtype, members in by_dtype.items()
        for run in tile_runs(members, tile_numel)
    )

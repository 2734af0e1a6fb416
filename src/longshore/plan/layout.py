"""What one rank holds of a model, laid out by the functions by which the engine lays it out; counted, not made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from longshore.host.backend import kept_on_device
from longshore.layout import TileRun, tile_runs
from longshore.optim.offload import default_tile_numel
from longshore.plan.choice import Choice, Job
from longshore.plan.model import PlannedModel
from longshore.sharding.bucket import fill_buckets, shard_numel_of, shard_parts
from longshore.sharding.rank_grid import chunk
from longshore.sharding.reduction import ReductionSettings
from longshore.sharding.stages import bucket_numel_of, reduces_each_backward

_MOST_PIECES = 50_000
"""Of a stage at which every rank steps everything: beyond that the padding between pieces is not counted."""


class Owned(NamedTuple):
    """A run of one parameter that this rank steps."""

    parameter: int
    """Its place among the trainable ones."""
    numel: int
    dtype: torch.dtype
    bucket: int | None
    """That brings its gradient; None: nothing is reduced."""


class PlannedBucket(NamedTuple):
    """Gradients that are reduced together."""

    parameters: tuple[int, ...]
    numel: int
    shard_numel: int
    dtype: torch.dtype


class TileGroup(NamedTuple):
    """Consecutive tiles of one size, dtype and place."""

    run: TileRun
    """Its parameters are places in :attr:`RankLayout.owned`."""
    dtype: torch.dtype
    gradient_dtype: torch.dtype


@dataclass(frozen=True)
class RankLayout:
    """Of one rank.

    Attributes:
        owned: what it steps, in the order in which its tiles have it.
        buckets: in the order in which backward launches them; none on one rank.
        host: tiles that the store on the host has (or the only one, where nothing is staged).
        device: tiles whose state stays on the device.
        numels_held: of each trainable parameter, the elements on this rank's device.
    """

    owned: tuple[Owned, ...]
    buckets: tuple[PlannedBucket, ...]
    host: tuple[TileGroup, ...]
    device: tuple[TileGroup, ...]
    numels_held: tuple[int, ...]


def lay_out(model: PlannedModel, job: Job, choice: Choice, ranks: int, staged: bool, rank: int = 0) -> RankLayout:
    """The layout of one rank; rank 0 has the most, padding left aside.

    Args:
        model: in its own dtypes; the job's are applied here.
        job: sizes of buckets and tiles.
        choice: stage, and where state is.
        ranks: that share the model.
        staged: parameters are on a device with its own memory.
        rank: whose.
    """
    trainable = model.cast(job.dtype).trainable
    entries = [(place, each.numel, each.dtype) for place, each in enumerate(trainable)]
    held = [each.numel for each in trainable]
    if ranks == 1:
        owned = [Owned(place, numel, dtype, None) for place, numel, dtype in entries]
        buckets: list[PlannedBucket] = []
    else:
        shards = {}
        if choice.stage == 3:
            shards = {place: chunk(each.shape[0], ranks, rank) for place, each in enumerate(trainable)}
            held = [
                (shards[place][1] - shards[place][0]) * (each.numel // max(1, each.shape[0]))
                for place, each in enumerate(trainable)
            ]
        owned, buckets = _sharded(model, job, choice, ranks, rank, entries, held)
    gradient_dtype = None if ranks == 1 else torch.float32
    resident = choice.offload == "none"
    kept = [0] * len(owned)
    if staged and not resident and choice.ratio != 1.0:
        kept = kept_on_device([each.numel for each in owned], choice.ratio)
    on_host = [(place, each.numel - kept[place], each.dtype) for place, each in enumerate(owned)]
    on_device = [(place, kept[place], each.dtype) for place, each in enumerate(owned)]
    moving = staged and not resident
    host = _tiles(on_host, job.tile_numel or default_tile_numel(moving), gradient_dtype)
    device = _tiles(on_device, job.tile_numel or default_tile_numel(False), gradient_dtype)
    if staged and resident:
        host, device = (), host
    return RankLayout(tuple(owned), tuple(buckets), host, device, tuple(held))


def _sharded(
    model: PlannedModel,
    job: Job,
    choice: Choice,
    ranks: int,
    rank: int,
    entries: Sequence[tuple[int, int, torch.dtype]],
    held: Sequence[int],
) -> tuple[list[Owned], list[PlannedBucket]]:
    settings = ReductionSettings(job.bucket_numel, reduces_each_backward(choice.stage))
    trainable = model.trainable
    kinds = [
        (place, numel, (dtype, trainable[place].unit) if choice.stage == 3 else dtype)
        for place, numel, dtype in entries
    ]
    owned: list[Owned] = []
    buckets: list[PlannedBucket] = []
    filled = fill_buckets(kinds, bucket_numel_of(settings))
    whole = choice.stage == 0 and ranks * len(filled) <= _MOST_PIECES
    for index, members in enumerate(filled):
        dtype = entries[members[0][0]][2]
        if choice.stage == 3:
            parts = [(place, held[place]) for place, _ in members if held[place] > 0]
            shard_numel = sum(numel for _, numel in parts)
        else:
            shard_numel = shard_numel_of(members, ranks)
            mine = range(ranks) if whole else (rank,)
            parts = [(part[0], part[3]) for each in mine for part in shard_parts(members, shard_numel, each)]
            if choice.stage == 0 and not whole:
                parts = list(members)
        owned += [Owned(place, numel, dtype, index) for place, numel in parts]
        numel = sum(numel for _, numel in members)
        buckets.append(PlannedBucket(tuple(place for place, _ in members), numel, shard_numel, dtype))
    return owned[::-1], buckets  # as the shards of an engine come to its store


def _tiles(
    parts: Sequence[tuple[int, int, torch.dtype]], tile_numel: int, gradient_dtype: torch.dtype | None
) -> tuple[TileGroup, ...]:
    by_dtype: dict[torch.dtype, list[tuple[int, int]]] = {}
    for place, numel, dtype in parts:
        if numel > 0:
            by_dtype.setdefault(dtype, []).append((place, numel))
    return tuple(
        TileGroup(run, dtype, gradient_dtype or dtype)
        for dtype, members in by_dtype.items()
        for run in tile_runs(members, tile_numel)
    )

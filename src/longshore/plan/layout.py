"""The layout of one rank, computed by the engine's own layout functions without allocating anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from longshore.plan.job import Job, PlanChoice, PlannedModel
from longshore.plan.matrices import (
    MATRIX_ARRAYS,
    MatrixBatch,
    batches_of,
    divided,
    laid_out_order,
    matrices_of,
)
from longshore.seam import (
    ReductionSettings,
    StateFormat,
    TileCount,
    chunk,
    default_tile_numel,
    fill_buckets,
    kept_on_device,
    shard_numel_of,
    shard_parts,
    tile_runs,
)

_MOST_RANGES = 50_000
"""At stage 0 every rank steps the ranges of all shards; beyond this number, padding between them is not counted."""


class PlannedRange(NamedTuple):
    """A range of one parameter that this rank steps."""

    parameter: int  # index among the trainable parameters
    numel: int
    dtype: torch.dtype
    bucket: int | None  # index of the bucket that reduces its gradient; None: nothing is reduced
    format: StateFormat  # of its states


class PlannedBucket(NamedTuple):
    """Gradients that are reduced together."""

    parameters: tuple[int, ...]
    numel: int
    shard_numel: int
    dtype: torch.dtype


class TileGroup(NamedTuple):
    """Consecutive tiles of one size, dtype and format of states."""

    run: TileCount  # its parameters are indices into RankLayout.owned
    dtype: torch.dtype
    gradient_dtype: torch.dtype
    arrays: int  # arrays of state, with the masters
    format: StateFormat  # of the other arrays than the masters

    def state_bytes(self, own_master: bool = False) -> int:
        """Return the bytes of one tile's state buffer; ``own_master``: without the masters."""
        return self.format.buffer_bytes(self.arrays, self.run.buffer_numel, own_master)

    def pass_bytes(self) -> int:
        """Return the bytes of state that a step of one tile reads and writes."""
        return 2 * self.format.buffer_bytes(self.arrays, self.run.numel)


@dataclass(frozen=True)
class RankLayout:
    """The layout of one rank; the first six fields are what it was made from."""

    model: PlannedModel  # with parameters in the job's dtype
    job: Job
    choice: PlanChoice
    ranks: int
    rank: int
    staged: bool  # gradients are copied from a device with its own memory into the host's tiles
    owned: tuple[PlannedRange, ...]  # what the rank steps, in the order of its tiles
    buckets: tuple[PlannedBucket, ...]  # in the order in which backward launches them; none on one rank
    host: tuple[TileGroup, ...]  # tiles of the store on the host, or of the only store
    device: tuple[TileGroup, ...]  # tiles whose state stays on the device
    matrices: tuple[TileGroup, ...]  # tiles of matrices, of the store on the host or of the only one
    batches: tuple[MatrixBatch, ...]  # in which matrices are transformed, in order
    numels: tuple[int, ...]  # elements of each trainable parameter in this rank's model

    @property
    def speculation(self) -> int | str:
        """Memory for stepping ahead: nothing is stepped ahead if the optimizer's state is on the device."""
        return self.choice.speculation if self.choice.offload == "cpu" else 0

    def own_master(self, dtype: torch.dtype) -> bool:
        """Whether parameters of this dtype are their own masters: see :class:`~longshore.tiles.TileStore`."""
        return dtype == torch.float32 and not self.publishes and not self.speculation

    @property
    def publishes(self) -> bool:
        """Whether new values of parameters are copied to a device."""
        return self.staged and not self.choice.streams

    @property
    def transforms_on_host(self) -> bool:
        """Whether matrices are transformed on the host, though the model computes on a device: where one rank's
        parameters rest."""
        return self.choice.streams and self.ranks == 1

    @property
    def reduces_each_backward(self) -> bool:
        """Whether several ranks reduce in every backward of a step, and not only in the last one."""
        settings = ReductionSettings(self.choice.stage, self.job.bucket_numel)
        return self.ranks > 1 and settings.each_backward


def lay_out(
    model: PlannedModel, job: Job, choice: PlanChoice, ranks: int, staged: bool, rank: int = 0, threads: int = 1
) -> RankLayout:
    """Return the layout of one of ``ranks`` ranks, with ``threads`` on the host; rank 0 stores the most, except for
    padding.

    ``model`` has its own dtypes, and is cast to the job's here. ``staged``: whether parameters are on a device with its
    own memory.
    """
    model = divided(model.cast(job.dtype), job)
    # On one rank, gradients of a streamed model come to ``.grad`` on the host before the store sees them.
    staged = staged and not (choice.streams and ranks == 1)
    numels = [each.numel for each in model.trainable]
    if choice.stage == 3 and ranks > 1:
        numels = _rows_of(model, ranks, rank)
    order = laid_out_order(model)
    formats = _formats_of(model, job)
    owned = [PlannedRange(index, numels[index], model.trainable[index].dtype, None, formats[index]) for index in order]
    buckets: list[PlannedBucket] = []
    if ranks > 1:
        owned, buckets = _sharded(model, job, choice.stage, (ranks, rank), numels)
    moves = staged and choice.offload == "cpu"
    is_matrix = [model.trainable[each.parameter].matrices is not None for each in owned]
    plain = [(index, each) for index, each in enumerate(owned) if not is_matrix[index]]
    kept = kept_on_device([each.numel for _, each in plain], choice.ratio if moves else 1.0)
    gradient_dtype = None if ranks == 1 else torch.float32
    on_host = [
        (index, each._replace(numel=each.numel - first)) for (index, each), first in zip(plain, kept, strict=True)
    ]
    on_device = [(index, each._replace(numel=first)) for (index, each), first in zip(plain, kept, strict=True)]
    tile_numel = job.tile_numel or default_tile_numel(moves, threads)
    host = _tiles(on_host, tile_numel, gradient_dtype, job.state_arrays)
    device = _tiles(on_device, job.tile_numel or default_tile_numel(False, 1), gradient_dtype, job.state_arrays)
    matrices = tuple(
        group  # a matrix has tiles of its own
        for index, each in enumerate(owned)
        if is_matrix[index]
        for group in _tiles([(index, each)], tile_numel, gradient_dtype, MATRIX_ARRAYS)
    )
    batches = _batches(model, job, choice.stage, ranks, owned, buckets)
    if staged and choice.offload == "none":
        host, device = (), host
    return RankLayout(
        model, job, choice, ranks, rank, staged, tuple(owned), tuple(buckets), host, device, matrices, batches,
        tuple(numels),
    )  # fmt: skip


def _formats_of(model: PlannedModel, job: Job) -> list[StateFormat]:
    """Return the format of the states of each trainable parameter."""
    return [job.state_format.of_parameter(each.shape) for each in model.trainable]


def _rows_of(model: PlannedModel, ranks: int, rank: int) -> list[int]:
    """Return how many elements of each trainable parameter a rank has at stage 3: some of its rows."""
    rows = [chunk(each.shape[0], ranks, rank) for each in model.trainable]
    return [
        (end - first) * (each.numel // max(1, each.shape[0]))
        for each, (first, end) in zip(model.trainable, rows, strict=True)
    ]


def _batches(
    model: PlannedModel,
    job: Job,
    stage: int,
    ranks: int,
    owned: Sequence[PlannedRange],
    buckets: Sequence[PlannedBucket],
) -> tuple[MatrixBatch, ...]:
    """Return the batches of matrices of a rank, whose ranges are ``owned``."""
    matrices = matrices_of(model, job)
    if not matrices:
        return ()
    here: dict[int, int] = {}
    for each in owned:
        here[each.parameter] = here.get(each.parameter, 0) + each.numel
    largest = {index: matrix.numel for index, matrix in matrices.items()}
    if stage == 3 and ranks > 1:
        largest = dict(enumerate(_rows_of(model, ranks, 0)))
    elif stage > 0:
        for bucket in buckets:
            begin = 0
            for index in bucket.parameters:
                numel = model.trainable[index].numel
                largest[index] = _largest_part(begin, numel, bucket.shard_numel)
                begin += numel
    return tuple(batches_of(matrices, here, largest, ranks))


def _largest_part(begin: int, numel: int, shard_numel: int) -> int:
    """Return the most elements of a parameter that one shard of its bucket has."""
    first = min(numel, shard_numel - begin % shard_numel)
    return max(first, min(numel - first, shard_numel))


def _sharded(
    model: PlannedModel, job: Job, stage: int, place: tuple[int, int], numels: Sequence[int]
) -> tuple[list[PlannedRange], list[PlannedBucket]]:
    """Return the ranges and buckets of one of several ranks; ``place`` is the number of ranks and the rank."""
    (ranks, rank), formats = place, _formats_of(model, job)
    # At stage 3, a bucket has parameters that are gathered together; otherwise, of one unit of division.
    keyed = [
        (index, each.numel, (each.dtype, each.unit if stage == 3 else formats[index].unit))
        for index, each in ((index, model.trainable[index]) for index in laid_out_order(model))
    ]
    filled = fill_buckets(keyed, ReductionSettings(stage, job.bucket_numel).bucket_numel)
    owned: list[PlannedRange] = []
    buckets: list[PlannedBucket] = []
    for bucket, members in enumerate(filled):
        dtype = model.trainable[members[0][0]].dtype
        if stage == 3:
            ranges = [(index, numels[index]) for index, _ in members if numels[index] > 0]
            shard_numel = sum(numel for _, numel in ranges)
        else:
            shard_numel = shard_numel_of(members, ranks, formats[members[0][0]].unit)
            shards = range(ranks) if stage == 0 else (rank,)
            ranges = members
            if stage > 0 or ranks * len(filled) <= _MOST_RANGES:
                ranges = [(part[0], part[2]) for each in shards for part in shard_parts(members, shard_numel, each)]
        owned += [PlannedRange(index, numel, dtype, bucket, formats[index]) for index, numel in ranges]
        numel = sum(numel for _, numel in members)
        buckets.append(PlannedBucket(tuple(index for index, _ in members), numel, shard_numel, dtype))
    return owned[::-1], buckets  # the engine gives shards to its store in this order


def _tiles(
    ranges: Sequence[tuple[int, PlannedRange]], tile_numel: int, gradient_dtype: torch.dtype | None, arrays: int
) -> tuple[TileGroup, ...]:
    runs = tile_runs(((index, each.numel, each.dtype, each.format) for index, each in ranges), tile_numel)
    return tuple(TileGroup(run.count, run.dtype, gradient_dtype or run.dtype, arrays, run.format) for run in runs)

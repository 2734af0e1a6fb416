"""The layout of one rank, computed by the engine's own layout functions without allocating anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from longshore.plan.job import Job, PlanChoice, PlannedModel
from longshore.plan.matrices import MATRIX_ARRAYS, MatrixBatch, batches_of, divided, laid_out_order, matrices_of
from longshore.seam import (
    Bucket,
    Home,
    HomeLayout,
    Layout,
    ReductionSettings,
    Spec,
    default_tile_numel,
    division_of,
    runs_by_home,
)

_MOST_RANGES = 50_000
"""At stage 0 every rank steps the ranges of all shards; beyond this number, padding between them is not counted."""


@dataclass(frozen=True)
class RankLayout:
    """The layout of one rank; the first six fields are its inputs."""

    model: PlannedModel  # with parameters in the job's dtype
    job: Job
    choice: PlanChoice
    ranks: int
    rank: int
    staged: bool  # gradients are copied from a device with its own memory into the host's tiles
    over_ranks: Layout | None  # of the trainable parameters, by their index among these; None on one rank
    owned: tuple[Spec, ...]  # what the rank steps, in the order of its tiles
    parameter_of: Mapping[int, int]  # trainable parameter, by the keys of ``owned``
    homes: tuple[HomeLayout, ...]  # tiles by where they rest; in the last home those of matrices come first
    batches: tuple[MatrixBatch, ...]  # in which matrices are transformed, in order
    numels: tuple[int, ...]  # elements of each trainable parameter in this rank's model
    sums_on_device: bool = False  # several gradients are added there, and their sum is copied in the last backward

    @property
    def speculation(self) -> int | str:
        """Memory for stepping ahead: nothing is stepped ahead if the optimizer's state is on the device."""
        return self.choice.speculation if self.choice.offloads else 0

    @property
    def main(self) -> HomeLayout:
        """The tiles on the host or, if all state stays there, on the device."""
        return self.homes[-1]

    @property
    def transforms_on_host(self) -> bool:
        """Whether matrices are transformed on the host, though the model computes on a device: where one rank's
        parameters rest."""
        return self.choice.streams and self.ranks == 1

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Gradients that are reduced together, in the order in which backward launches them; none on one rank."""
        return () if self.over_ranks is None else self.over_ranks.buckets

    @property
    def arrivals(self) -> int:
        """Gradients of one parameter that the store gets in a step."""
        return self.job.accumulation if self.ranks == 1 or self.reduces_each_backward else 1

    @property
    def may_add_on_device(self) -> bool:
        """Whether gradients on their way to the host may stay on the device until they are added."""
        return self.main.may_get_sums(self.arrivals)

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
    specs = _specs_of(model, job)
    over_ranks = _over_ranks(model, job, choice.stage, (ranks, rank), specs) if ranks > 1 else None
    owned, parameter_of = specs, {spec.key: spec.key for spec in specs}
    if over_ranks is not None and (choice.stage > 0 or ranks * len(over_ranks.buckets) <= _MOST_RANGES):
        owned, parameter_of = over_ranks.parts(), {key: each.parameter for key, each in over_ranks.ranges.items()}
    elif over_ranks is not None:
        owned = over_ranks.in_order_of_tiles()
    homes = Home.of(choice.offloads, choice.ratio, staged)
    threads_of = {Home.HOST: threads, Home.DEVICE: 1}
    numels_of = {home: default_tile_numel(staged and home is Home.HOST, threads_of[home]) for home in homes}
    runs = runs_by_home(owned, choice.ratio, {home: job.tile_numel or numel for home, numel in numels_of.items()})
    publishes, speculates = staged and not choice.streams, choice.offloads and bool(choice.speculation)
    rests = tuple(
        HomeLayout(
            home,
            tuple(run for run in runs if run.home is home),
            job.state_arrays,
            MATRIX_ARRAYS,
            None if ranks == 1 else torch.float32,
            staged=staged and home is Home.HOST,
            publishes=publishes,
            own_masters=not (publishes or speculates),
        )
        for home in homes
    )
    numels = [each.numel for each in model.trainable]
    if over_ranks is not None and choice.stage == 3:
        numels = [sum(each.numel for each in over_ranks.owned(index)) for index in range(len(numels))]
    return RankLayout(
        model, job, choice, ranks, rank, staged, over_ranks, tuple(owned), parameter_of, rests,
        tuple(_batches(model, job, ranks, owned, over_ranks)), tuple(numels),
    )  # fmt: skip


def _specs_of(model: PlannedModel, job: Job) -> list[Spec]:
    """Return the trainable parameters as the optimizer lays them out, by their index among these."""
    specs = []
    for index in laid_out_order(model):
        each = model.trainable[index]
        matrix = None if each.matrices is None else each.matrices.whole(index)
        specs.append(Spec(index, each.numel, each.dtype, job.state_format.coding_of(each.shape), matrix))
    return specs


def _over_ranks(model: PlannedModel, job: Job, stage: int, place: tuple[int, int], specs: Sequence[Spec]) -> Layout:
    """Return the layout of one of several ranks; ``place`` is the number of ranks and the rank."""
    shapes, units = [each.shape for each in model.trainable], [each.unit for each in model.trainable]
    bucket_numel = ReductionSettings(stage, job.bucket_numel).bucket_numel
    return Layout(division_of(stage, *place, shapes, units), bucket_numel).extended(specs)


def _batches(
    model: PlannedModel, job: Job, ranks: int, owned: Sequence[Spec], over_ranks: Layout | None
) -> Iterator[MatrixBatch]:
    """Yield the batches of matrices of a rank, which steps those that are ``owned``."""
    matrices = matrices_of(model, job)
    here: dict[int, int] = {}
    for spec in owned:
        if spec.matrix is not None:
            here[spec.matrix.parameter] = here.get(spec.matrix.parameter, 0) + spec.numel
    largest = {index: matrix.numel for index, matrix in matrices.items()}
    if over_ranks is not None:
        largest = {index: over_ranks.most_stepped(index) for index in matrices}
    yield from batches_of(matrices, here, largest, ranks)

"""The input of a simulation: the model as segments that forward passes through, and a rank's tiles as jobs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from longshore.plan.job import PlannedModel, PlannedParameter, Use, parameter_bytes
from longshore.plan.layout import RankLayout
from longshore.plan.machine import Work
from longshore.plan.memory import spares_of
from longshore.seam import HomeLayout, TileRun

MOST_JOBS = 512
"""Approximate maximum number of jobs as which the tiles of a rank are simulated; a job is consecutive tiles."""


_UPDATE_BYTES = torch.bfloat16.itemsize
"""Bytes of an element of a matrix on its way to the transformation, and back."""


class ModelSegment(NamedTuple):
    """A part of the model that is computed at once: a block, or the modules between two blocks."""

    key: int
    unit: int | None
    parameters: tuple[int, ...]  # indices among the trainable ones, whose gradients its backward completes
    work: Work
    num_bytes: int  # of its parameters


class TileJob(NamedTuple):
    """Consecutive tiles, which wait for nearly the same gradients."""

    key: int
    numel: int
    state_bytes: int  # that a step reads and writes; the write of a parameter that is its own master is not among them
    gradient_bytes: int
    parameter_bytes: int
    sources: frozenset[Hashable]  # keys of the segments, or of the buckets, that bring its gradients
    ahead: bool  # all of its tiles have a spare

    @property
    def num_bytes(self) -> int:
        """Bytes that a step reads and writes."""
        return self.state_bytes + self.gradient_bytes + self.parameter_bytes


def segments_of(model: PlannedModel) -> list[ModelSegment]:
    """Return the segments in forward's order; ``model`` is cast already."""
    index = {each.name: number for number, each in enumerate(model.trainable)}
    heads = [each for each in model.parameters if each.use is Use.HEAD]
    others = [each for each in model.parameters if each.use is not Use.HEAD]
    attention = model.attention_width / model.units if model.units else 0.0
    segments: list[ModelSegment] = []
    for (unit, _), found in groupby(others, lambda each: (each.unit, each.use if each.unit is None else None)):
        members = list(found)
        parameters = tuple(index[each.name] for each in members if each.trainable)
        work = _work(members, attention if unit is not None else 0.0)
        segments.append(ModelSegment(len(segments), unit, parameters, work, parameter_bytes(members)))
    first_unit = next((number for number, each in enumerate(model.parameters) if each.unit is not None), 0)
    for head in heads:  # last in forward, wherever it is registered
        number = model.parameters.index(head)
        tied = number < first_unit and number < len(model.parameters) - len(heads)
        parameters = (index[head.name],) if head.trainable else ()
        if tied and segments:
            # Its embedding is used first in forward, so the first segment completes the gradient.
            segments[0] = segments[0]._replace(parameters=segments[0].parameters + parameters)
            parameters = ()
        segments.append(ModelSegment(len(segments), None, parameters, _work([head], 0.0), parameter_bytes([head])))
    return segments


def _work(members: Sequence[PlannedParameter], attention: float) -> Work:
    return Work(
        sum(each.multiplied for each in members),
        sum(each.width for each in members),
        sum(each.shape[0] for each in members if each.use is Use.HEAD),
        attention,
        sum(each.numel * each.dtype.itemsize for each in members if each.multiplied),
        sum(each.numel for each in members if each.use is Use.LOOKED_UP),
    )


class MatrixJob(NamedTuple):
    """Consecutive batches of matrices."""

    tiles: TileJob  # this rank's parts of them, with all that both of their passes read and write
    operations: int  # of the rank that has the most to transform
    sent_bytes: int  # between ranks, one way, as if each sent equally much to each; 0: nothing is sent
    batches: int

    @property
    def part_bytes(self) -> int:
        """Bytes of this rank's parts where they are transformed."""
        return _UPDATE_BYTES * self.tiles.numel

    @property
    def first_bytes(self) -> int:
        """Bytes of the passes before the transformation, which read gradients and momentum."""
        return self.tiles.gradient_bytes + 2 * torch.float32.itemsize * self.tiles.numel + self.part_bytes

    @property
    def last_bytes(self) -> int:
        """Bytes of the passes after it, which read the result and the masters."""
        return self.tiles.num_bytes - self.first_bytes


def tile_jobs(layout: RankLayout, segments: Sequence[ModelSegment]) -> list[TileJob]:
    """Return the tiles of the last home as jobs in their order, without those of matrices."""
    source = _sources(layout, segments)
    home = layout.main.only(of_matrices=False)
    total = home.tiles
    first_ahead = total - spares_of(layout).others
    most = -(-total // MOST_JOBS)
    jobs: list[TileJob] = []
    tile = room = 0
    for run in home.runs:
        left = run.tiles
        while left:
            ahead = tile >= first_ahead
            if room == 0 or tile == first_ahead:
                jobs.append(TileJob(len(jobs), 0, 0, 0, 0, frozenset(), ahead))
                room = most
            count = min(left, room, left if ahead else first_ahead - tile)
            jobs[-1] = _joined(len(jobs) - 1, (jobs[-1], _tiles_of(home, source, run, count, ahead)))
            tile, left, room = tile + count, left - count, room - count
    return jobs


def matrix_jobs(layout: RankLayout, segments: Sequence[ModelSegment], first_key: int) -> list[MatrixJob]:
    """Return the batches of matrices as jobs in their order; the keys of their tiles begin at ``first_key``."""
    source = _sources(layout, segments)
    home = layout.main.only(of_matrices=True)
    first_ahead = home.tiles - spares_of(layout).of_matrices
    parts: dict[int, list[TileJob]] = {}
    tile = 0
    for run in home.runs:
        (key,) = run.parameters
        part = _tiles_of(home, source, run, run.tiles, tile >= first_ahead)
        parts.setdefault(layout.parameter_of[key], []).append(part)
        tile += run.tiles
    together = max(1, -(-len(layout.batches) // MOST_JOBS))
    jobs: list[MatrixJob] = []
    for place in range(0, len(layout.batches), together):
        batches = layout.batches[place : place + together]
        here = [part for batch in batches for each in batch.matrices for part in parts.get(each.parameter, ())]
        tiles = _joined(first_key + len(jobs), here)
        # The result of the first pass is written, and what becomes of it is read.
        tiles = tiles._replace(state_bytes=tiles.state_bytes + 2 * _UPDATE_BYTES * tiles.numel)
        sent = sum(_UPDATE_BYTES * layout.ranks * batch.part_numel for batch in batches)
        jobs.append(MatrixJob(tiles, sum(batch.operations for batch in batches), sent, len(batches)))
    return jobs


def _sources(layout: RankLayout, segments: Sequence[ModelSegment]) -> Callable[[int], Hashable]:
    """Return a function of an owned key that returns the key of the work that brings its gradient."""
    segment_of = {parameter: segment.key for segment in segments for parameter in segment.parameters}
    over_ranks = layout.over_ranks
    if over_ranks is None:
        return segment_of.__getitem__
    return lambda key: ("bucket", over_ranks.bucket_of[layout.parameter_of[key]].index)


def _tiles_of(home: HomeLayout, source: Callable[[int], Hashable], run: TileRun, count: int, ahead: bool) -> TileJob:
    """Return some tiles of a run as a job without a key."""
    numel = count * run.numel
    written = run.dtype.itemsize * home.own_master(run)
    return TileJob(
        0,
        numel,
        count * home.pass_bytes(run) - numel * written,
        numel * home.gradient_dtype_of(run).itemsize,
        numel * run.dtype.itemsize,
        frozenset(source(key) for key in run.parameters),
        ahead,
    )


def _joined(key: int, jobs: Sequence[TileJob]) -> TileJob:
    """Return several jobs as one, which goes ahead if all of them do."""
    sums = (sum(values) for values in zip(*(each[1:5] for each in jobs), strict=True))
    numel, state_bytes, gradient_bytes, parameter_bytes = sums if jobs else (0, 0, 0, 0)
    sources = frozenset[Hashable]().union(*(each.sources for each in jobs))
    ahead = bool(jobs) and all(each.ahead for each in jobs)
    return TileJob(key, numel, state_bytes, gradient_bytes, parameter_bytes, sources, ahead)

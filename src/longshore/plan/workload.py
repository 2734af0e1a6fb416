"""The input of a simulation: the model as segments that forward passes through, and a rank's tiles as jobs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from longshore.plan.job import PlannedModel, PlannedParameter, Use, parameter_bytes
from longshore.plan.layout import RankLayout, spare_tiles
from longshore.plan.machine import Work

MOST_JOBS = 512
"""Approximate maximum number of jobs as which the tiles of a rank are simulated; a job is consecutive tiles."""


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


def tile_jobs(layout: RankLayout, segments: Sequence[ModelSegment]) -> list[TileJob]:
    """Return the tiles of the store on the host, or of the only store, as jobs in the order of the tiles."""
    segment_of = {parameter: segment.key for segment in segments for parameter in segment.parameters}

    def source(owned: int) -> Hashable:
        entry = layout.owned[owned]
        return segment_of[entry.parameter] if entry.bucket is None else ("bucket", entry.bucket)

    groups = layout.host or layout.device
    total = sum(group.run.tiles for group in groups)
    first_ahead = total - spare_tiles(groups, layout.job.state_arrays, layout.speculation)[0]
    most = -(-total // MOST_JOBS)
    jobs: list[TileJob] = []
    tile = room = 0
    for group in groups:
        left = group.run.tiles
        while left:
            ahead = tile >= first_ahead
            if room == 0 or tile == first_ahead:
                jobs.append(TileJob(len(jobs), 0, 0, 0, 0, frozenset(), ahead))
                room = most
            count = min(left, room, left if ahead else first_ahead - tile)
            job, numel = jobs[-1], count * group.run.numel
            written = group.dtype.itemsize * layout.own_master(group.dtype)
            jobs[-1] = job._replace(
                numel=job.numel + numel,
                state_bytes=job.state_bytes + numel * (2 * torch.float32.itemsize * layout.job.state_arrays - written),
                gradient_bytes=job.gradient_bytes + numel * group.gradient_dtype.itemsize,
                parameter_bytes=job.parameter_bytes + numel * group.dtype.itemsize,
                sources=job.sources | {source(owned) for owned in group.run.parameters},
            )
            tile, left, room = tile + count, left - count, room - count
    return jobs

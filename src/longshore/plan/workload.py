"""What is simulated: the model as segments that forward passes through, and a rank's tiles as jobs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from longshore.plan.layout import RankLayout, TileGroup
from longshore.plan.machine import Work
from longshore.plan.memory import spare_tiles
from longshore.plan.model import PlannedModel, PlannedParameter, Use, parameter_bytes

MOST_JOBS = 512
"""The tiles of a rank are simulated as about so many jobs at most; a job is some tiles in a row."""


class ModelSegment(NamedTuple):
    """What is computed in one go: a block, or what lies between blocks."""

    key: int
    unit: int | None
    parameters: tuple[int, ...]  # indices among the trainable ones, whose gradients its backward completes
    work: Work
    num_bytes: int  # of its parameters


class TileJob(NamedTuple):
    """Some tiles in a row, which wait for nearly the same gradients."""

    key: int
    numel: int
    gradient_bytes: int
    parameter_bytes: int
    sources: frozenset[Hashable]  # keys of the segments, or of the buckets, that bring its gradients
    ahead: bool  # all of its tiles have a spare


def segments_of(model: PlannedModel) -> list[ModelSegment]:
    """The segments in forward's order; ``model`` is cast already."""
    index = {each.name: number for number, each in enumerate(model.trainable)}
    groups: list[tuple[int | None, list[PlannedParameter]]] = []
    heads = [each for each in model.parameters if each.use is Use.HEAD]
    for each in model.parameters:
        unit, former = each.unit, groups[-1] if groups else None
        if each.use is Use.HEAD:
            continue
        if former and former[0] == unit and (unit is not None or former[1][-1].use is each.use):
            former[1].append(each)
        else:
            groups.append((unit, [each]))
    attention = model.attention_width / model.units if model.units else 0.0
    segments = []
    for unit, members in groups:
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
    """The tiles of the store on the host, or of the only store, as jobs in the order of the tiles."""
    segment_of = {parameter: segment.key for segment in segments for parameter in segment.parameters}

    def source(owned: int) -> Hashable:
        entry = layout.owned[owned]
        return segment_of[entry.parameter] if entry.bucket is None else ("bucket", entry.bucket)

    groups = layout.host or layout.device
    total = sum(group.run.tiles for group in groups)
    speculation = layout.choice.speculation if layout.choice.offload == "cpu" else 0
    first_ahead = total - spare_tiles(groups, layout.job.state_arrays, speculation)[0]
    jobs: list[TileJob] = []
    for ahead, chunks in _chunks(groups, first_ahead, -(-total // MOST_JOBS)):
        numels = [(count * group.run.numel, group) for group, count in chunks]
        jobs.append(
            TileJob(
                len(jobs),
                sum(numel for numel, _ in numels),
                sum(numel * group.gradient_dtype.itemsize for numel, group in numels),
                sum(numel * group.dtype.itemsize for numel, group in numels),
                frozenset(source(owned) for group, _ in chunks for owned in group.run.parameters),
                ahead,
            )
        )
    return jobs


def _chunks(
    groups: Sequence[TileGroup], first_ahead: int, most: int
) -> Iterator[tuple[bool, list[tuple[TileGroup, int]]]]:
    """Whether tiles have spares, and up to ``most`` of them in a row: how many of which groups."""
    chunk: list[tuple[TileGroup, int]] = []
    tile = size = 0
    for group in groups:
        left = group.run.tiles
        while left:
            ahead = tile >= first_ahead
            count = min(left, most - size, left if ahead else first_ahead - tile)
            chunk.append((group, count))
            tile, left, size = tile + count, left - count, size + count
            if size == most or tile == first_ahead:
                yield ahead, chunk
                chunk, size = [], 0
    if chunk:
        yield tile > first_ahead, chunk

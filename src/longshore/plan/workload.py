"""A model as a row of segments that forward goes through, and a rank's tiles as the jobs that are simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from longshore.plan.choice import Choice, Job
from longshore.plan.layout import RankLayout, TileGroup
from longshore.plan.machine import Work
from longshore.plan.memory import spare_tiles
from longshore.plan.model import PlannedModel, PlannedParameter, Use, parameter_bytes

MOST_JOBS = 256
"""Jobs that the tiles of a rank are simulated as, about: where there are more tiles, some in a row are one job."""


class Segment(NamedTuple):
    """What is computed in one go: a block, or what lies between blocks."""

    key: int
    unit: int | None
    parameters: tuple[int, ...]
    """Places among the trainable ones whose gradients backward of this segment brings."""
    work: Work
    gathered_bytes: int
    """Of its parameters, where it is a unit."""


@dataclass(frozen=True)
class TileJob:
    """Some tiles in a row that wait for the same things, or nearly.

    Attributes:
        key: its own.
        numel: elements of all of its tiles.
        itemsize, gradient_itemsize: bytes of one of them, as a parameter and as a gradient.
        sources: keys of the segments, or of the buckets, that bring its gradients.
        ahead: all of its tiles have a spare.
    """

    key: int
    numel: int
    itemsize: int
    gradient_itemsize: int
    sources: frozenset[Hashable]
    ahead: bool


def segments_of(model: PlannedModel) -> list[Segment]:
    """The segments in forward's order; ``model`` is cast already."""
    trainable = {each.name: place for place, each in enumerate(model.trainable)}
    runs: list[tuple[int | None, list[PlannedParameter]]] = []
    heads: list[PlannedParameter] = []
    for each in model.parameters:
        if each.use is Use.HEAD:
            heads.append(each)
        elif runs and runs[-1][0] == each.unit and (each.unit is not None or runs[-1][1][-1].use is each.use):
            runs[-1][1].append(each)
        else:
            runs.append((each.unit, [each]))
    attention = model.attention_width / model.units if model.units else 0.0
    segments = [
        Segment(
            key,
            unit,
            tuple(trainable[each.name] for each in members if each.trainable),
            _work(members, attention if unit is not None else 0.0),
            parameter_bytes(members),
        )
        for key, (unit, members) in enumerate(runs)
    ]
    for head in heads:  # last in forward, wherever it is registered
        tied = model.parameters.index(head) < len(model.parameters) - len(heads) and _is_first(model, head)
        places = () if tied or not head.trainable else (trainable[head.name],)
        segments.append(Segment(len(segments), None, places, _work([head], 0.0), parameter_bytes([head])))
        if tied and head.trainable:
            # Looked up first in forward, so its gradient is complete with the last of backward.
            segments.insert(0, Segment(-1, None, (trainable[head.name],), Work(0.0, 0.0, 0.0, 0.0, 0), 0))
    return segments


def _is_first(model: PlannedModel, head: PlannedParameter) -> bool:
    first_unit = next((place for place, each in enumerate(model.parameters) if each.unit is not None), 0)
    return model.parameters.index(head) < first_unit


def _work(members: Sequence[PlannedParameter], attention: float) -> Work:
    return Work(
        sum(each.multiplied for each in members),
        sum(each.width for each in members),
        sum(each.shape[0] for each in members if each.use is Use.HEAD),
        attention,
        round(sum(each.dtype.itemsize * each.multiplied / max(each.active, 1e-9) for each in members)),
        sum(each.numel for each in members if each.use is Use.LOOKED_UP),
    )


def tile_jobs(job: Job, choice: Choice, layout: RankLayout, segments: Sequence[Segment]) -> list[TileJob]:
    """The tiles of the store on the host (or the only one) as jobs, in the order of the tiles."""
    segment_of = {place: segment.key for segment in segments for place in segment.parameters}

    def source(owned: int) -> Hashable:
        entry = layout.owned[owned]
        return segment_of[entry.parameter] if entry.bucket is None else ("bucket", entry.bucket)

    groups = layout.host or layout.device
    total = sum(group.run.tiles for group in groups)
    spared = spare_tiles(groups, job.page_arrays, choice.speculation if choice.offload == "cpu" else 0).tiles
    at_once = -(-total // MOST_JOBS)
    jobs: list[TileJob] = []
    for start, group, count in _chunks(groups, at_once):
        jobs.append(
            TileJob(
                len(jobs),
                count * group.run.numel,
                group.dtype.itemsize,
                group.gradient_dtype.itemsize,
                frozenset(source(each) for each in group.run.parameters),
                start >= total - spared,
            )
        )
    return _merged(jobs, at_once)


def _chunks(groups: Sequence[TileGroup], at_once: int) -> list[tuple[int, TileGroup, int]]:
    """``(first tile, its group, how many)``, at most ``at_once`` together."""
    chunks, start = [], 0
    for group in groups:
        left = group.run.tiles
        while left:
            count = min(left, at_once)
            chunks.append((start, group, count))
            start, left = start + count, left - count
    return chunks


def _merged(jobs: list[TileJob], at_once: int) -> list[TileJob]:
    """Fewer, where many tiles have a run of their own."""
    if at_once == 1 or len(jobs) <= 2 * MOST_JOBS:
        return jobs
    size = -(-len(jobs) // MOST_JOBS)
    merged = []
    for start in range(0, len(jobs), size):
        some = jobs[start : start + size]
        kinds = Counter((each.itemsize, each.gradient_itemsize) for each in some)
        itemsize, gradient_itemsize = kinds.most_common(1)[0][0]
        merged.append(
            TileJob(
                len(merged),
                sum(each.numel for each in some),
                itemsize,
                gradient_itemsize,
                frozenset().union(*(each.sources for each in some)),
                all(each.ahead for each in some),
            )
        )
    return merged

"""Simulate one training step with the schedule of the engine.

The table of :mod:`longshore.tiles.events`, and the rows that this module adds for several ranks, say on which track
each event runs and its predecessors; ``commit_moves`` gives the order of a commit. This module adds how long each
event takes, and the order in which backward asks for events.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from longshore.plan.event_simulator import EventSimulator, Span
from longshore.plan.job import Job, PlanChoice, PlannedModel
from longshore.plan.layout import RankLayout, lay_out
from longshore.plan.machine import PlanMachine
from longshore.plan.workload import MatrixJob, ModelSegment, TileJob, matrix_jobs, segments_of, tile_jobs
from longshore.seam import (
    ADD,
    ARRIVE,
    COPY_TO_HOST,
    DEVICE_GATHER_NUMEL,
    DEVICE_SLICE_NUMEL,
    FETCH,
    GATHER_NUMEL,
    MATRICES_UNDER_WAY,
    MEASURE,
    NORM,
    PUBLISH,
    SCHEDULE,
    SLICE_NUMEL,
    STEP_AHEAD,
    STEP_IN_PLACE,
    TRANSFORM,
    Move,
    Row,
    Track,
    Which,
    commit_moves,
)

REDUCE = "reduce"
"""The reduction of one bucket; every tile with a range of that bucket waits for it."""
GATHER = "gather"
"""The gathering of one bucket's parameters (stages 1 and 2), or of one unit's, before it is used (stage 3)."""
SHARDED_SCHEDULE: Mapping[str, Row] = {
    **SCHEDULE,
    REDUCE: Row(Track.COLLECTIVES, ((ARRIVE, Which.SAME),)),
    COPY_TO_HOST: Row(Track.TO_HOST, ((REDUCE, Which.SAME),)),
    NORM: Row(Track.HOST, ((ARRIVE, Which.ALL), (REDUCE, Which.ALL), (COPY_TO_HOST, Which.ALL))),
    GATHER: Row(Track.COLLECTIVES, ((STEP_IN_PLACE, Which.ALL), (PUBLISH, Which.ALL))),
}
"""The schedule of a tile, with the rows that several ranks add to it."""

FORWARD = "forward"
GATHER_TO_USE = "gather to use"
STEP_ON_DEVICE = "step on the device"
EXCHANGE = "exchange of matrices"
"""Parts of matrices travel to the ranks that transform them, or back."""
_FURTHER_EVENTS: Mapping[str, Row] = {
    FORWARD: Row(Track.COMPUTE),
    GATHER_TO_USE: Row(Track.COLLECTIVES),
    FETCH: Row(Track.TO_DEVICE),
    ADD: Row(Track.HOST, ((COPY_TO_HOST, Which.SAME),)),
    MEASURE: Row(Track.HOST, ((COPY_TO_HOST, Which.SAME),)),
    STEP_ON_DEVICE: Row(Track.COMPUTE, ((NORM, Which.ALL),)),
    EXCHANGE: Row(Track.COLLECTIVES, ((NORM, Which.ALL), (STEP_AHEAD, Which.ALL))),
    TRANSFORM: Row(Track.COMPUTE, ((NORM, Which.ALL), (STEP_AHEAD, Which.ALL))),
}
"""Events that the engine's tables do not have."""

_MOST_BACKWARDS = 5
"""Maximum number of backwards that are simulated: the second makes sums, and from the third on all are alike."""
_OUT_OF_PLACE = 0.93 / 0.74
"""How much longer a pass into a spare takes than one in place (docs/results: the bandwidth that each reaches)."""
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Simulation:
    """Times of one step on one rank."""

    step_s: float  # from the first forward to the end of ``step()``
    exposed_s: float  # the part after the last backward: the norm and ``step()``, as ``longshore.trace`` counts it
    compute_s: float  # forward and backward alone, with the sums of gradients that run on the same track
    busy_s: Mapping[str, float]  # by track
    spans: tuple[Span, ...]  # all simulated events; of accumulated backwards only a few

    @property
    def waited_s(self) -> float:
        """The part of forward and backward in which they wait for parameters."""
        return max(0.0, self.step_s - self.exposed_s - self.compute_s)


def simulate(
    model: PlannedModel, machine: PlanMachine, job: Job, choice: PlanChoice, layout: RankLayout | None = None
) -> Simulation:
    """Simulate one step; ``layout`` is the result of :func:`~longshore.plan.layout.lay_out` for this choice."""
    layout = layout or lay_out(model, job, choice, machine.ranks, machine.staged, threads=machine.threads_of_a_rank)
    return _Step(machine, job, layout).run()


class _Step:
    def __init__(self, machine: PlanMachine, job: Job, layout: RankLayout) -> None:
        self._machine = machine
        self._job = job
        self._layout = layout
        self._stage = layout.choice.stage
        self._sharded = machine.ranks > 1
        self._each_backward = not self._sharded or layout.reduces_each_backward
        self._gathers = self._sharded and self._stage == 3
        self._streams = machine.staged and layout.choice.streams
        self._there: set[int] = set()  # units that backward finds on the device
        self._offloads = layout.choice.offloads
        self._copies = machine.staged and self._offloads
        self._segments = segments_of(layout.model)
        self._tiles = tile_jobs(layout, self._segments)
        self._matrices = matrix_jobs(layout, self._segments, len(self._tiles))
        self._all_tiles = [*(matrix.tiles for matrix in self._matrices), *self._tiles]
        self._passes = {tile.key: tile.num_bytes for tile in self._tiles}
        """Bytes of the passes that may go ahead, by tile: of matrices, those of the first ones."""
        self._passes |= {matrix.tiles.key: matrix.first_bytes for matrix in self._matrices}
        self._trainable = layout.model.trainable
        self._seconds = {
            each.key: machine.compute.seconds(each.work, job.tokens, job.seq_len) for each in self._segments
        }
        self._sums = self._sharded and not self._each_backward and job.accumulation > 1
        self._early_norms = self._offloads and bool(layout.choice.speculation) and job.clipping is not None
        self._device_steps = machine.staged and not self._offloads
        same_as = {} if self._copies else {Track.HOST: Track.COMPUTE}
        if not machine.staged:  # the same CPUs do everything
            same_as[Track.COLLECTIVES] = Track.COMPUTE
        self._time = EventSimulator({**(SHARDED_SCHEDULE if self._sharded else SCHEDULE), **_FURTHER_EVENTS}, same_as)
        self._ahead: list[TileJob] = []  # tiles that arrived in the last backward

    def run(self) -> Simulation:
        backwards = min(self._job.accumulation, _MOST_BACKWARDS)
        done = []  # after each backward: when it ended, and the times of the tracks
        for number in range(backwards):
            self._forward()
            self._backward(number, last=number == backwards - 1)
            done.append((self._time.last(ARRIVE), {**self._time.busy}))
        self._norm()
        self._commit()
        step, computed, busy = self._time.end, done[-1][0], {**self._time.busy}
        parts = (FORWARD, ARRIVE) if self._copies else (FORWARD, ARRIVE, ADD)
        compute = self._seconds_of(parts, 0.0, computed)
        if skipped := self._job.accumulation - backwards:
            (begun, before), (ended, after) = done[-3:-1]
            step, computed = step + skipped * (ended - begun), computed + skipped * (ended - begun)
            compute += skipped * self._seconds_of(parts, begun, ended)
            busy = {track: seconds + skipped * (after[track] - before[track]) for track, seconds in busy.items()}
        busy_s = {track.value: seconds for track, seconds in busy.items() if seconds > 0}
        return Simulation(step, step - computed, compute, busy_s, tuple(self._time.spans))

    def _seconds_of(self, names: Sequence[str], begin_s: float, end_s: float) -> float:
        """Return the time of all events of some kinds that run from ``begin_s`` to ``end_s``."""
        spans = [span for span in self._time.spans if span.name in names]
        return sum(max(0.0, min(span.end_s, end_s) - max(span.begin_s, begin_s)) for span in spans)

    # -- forward and backward -------------------------------------------------

    def _forward(self) -> None:
        begun = self._time.last(ARRIVE)
        root = sum(segment.num_bytes for segment in self._segments if segment.unit is None)
        root_ready = self._bring_up("root", root, begun)
        used: list[float] = []
        for segment in self._segments:
            ready = self._gather(segment, used) or root_ready
            used.append(self._time.run(FORWARD, segment.key, self._seconds[segment.key].forward, not_before=ready))
        if self._streams and not self._sharded:
            self._there = {segment.key for segment in [each for each in self._segments if each.unit is not None][-2:]}

    def _gather(self, segment: ModelSegment, used: list[float]) -> float:
        """Return when a unit's parameters are there; 0.0 if they always are. ``used``: ends of segments before it."""
        if segment.unit is None:
            return 0.0
        if segment.key in self._there:
            self._there.remove(segment.key)
            return 0.0
        free = used[-2] if len(used) > 1 else 0.0  # no more than one unit ahead
        return self._bring_up(segment.key, segment.num_bytes, free)

    def _bring_up(self, key: Hashable, num_bytes: float, free: float) -> float:
        """Copy parameters to the device and gather them, as the choice asks for, from ``free`` on."""
        if self._streams:
            of_rank = num_bytes / self._machine.ranks
            free = self._time.run(FETCH, key, of_rank / self._machine.to_device_bytes_per_s, not_before=free)
        if self._gathers:
            free = self._time.run(GATHER_TO_USE, key, self._gather_s(num_bytes), not_before=free)
        return free

    def _backward_s(self, segment: ModelSegment, number: int) -> float:
        forward, seconds = self._seconds[segment.key]
        if self._job.checkpointing and segment.unit is not None:
            seconds += forward
        if (self._sums or self._layout.sums_on_device) and number > 0:  # in float32, in the memory of the gradients
            trainable = (self._trainable[index] for index in segment.parameters)
            num_bytes = sum(self._sum_bytes(each.numel, each.dtype.itemsize, number) for each in trainable)
            if not self._sums:
                num_bytes /= self._machine.ranks  # what is reduced
            seconds += self._device_s(num_bytes) if self._machine.staged else self._host_s(num_bytes)
        return seconds + self._machine.arrival_s * len(segment.parameters)

    def _backward(self, number: int, last: bool) -> None:
        buckets = self._layout.buckets
        bucket_of = {} if self._layout.over_ranks is None else self._layout.over_ranks.bucket_of
        missing = [len(bucket.members) for bucket in buckets]
        brought_by: list[set[int]] = [set() for _ in buckets]
        waiting = {tile.key: len(tile.sources) for tile in self._all_tiles}
        tiles_of: dict[Hashable, list[TileJob]] = {}
        for tile in self._all_tiles:
            for source in tile.sources:
                tiles_of.setdefault(source, []).append(tile)

        def arrive(source: Hashable) -> None:
            for tile in tiles_of.get(source, ()):
                waiting[tile.key] -= 1
                if waiting[tile.key] == 0:
                    self._bring(tile, number, last)

        used: list[float] = []
        following = 0  # the next bucket to reduce
        for segment in reversed(self._segments):
            ready = self._gather(segment, used)
            used.append(self._time.run(ARRIVE, segment.key, self._backward_s(segment, number), not_before=ready))
            if not self._sharded:
                arrive(segment.key)
            for index in (bucket_of[each].index for each in segment.parameters if each in bucket_of):
                missing[index] -= 1
                brought_by[index].add(segment.key)
            while (self._each_backward or last) and following < len(buckets) and missing[following] == 0:
                self._reduce(following, brought_by[following])
                arrive(("bucket", following))
                following += 1

    def _reduce(self, index: int, keys: set[int]) -> None:
        bucket = self._layout.buckets[index]
        numel, itemsize = bucket.numel, bucket.dtype.itemsize
        speed = self._machine.reduce_bytes_per_s or self._machine.exchange_bytes_per_s
        num_bytes = numel * (_FLOAT_BYTES if self._sums else itemsize)
        most = DEVICE_SLICE_NUMEL if self._machine.staged else SLICE_NUMEL
        seconds = self._exchange_s(num_bytes, -(-numel // most), speed)
        if self._stage == 0:
            seconds += self._exchange_s(_FLOAT_BYTES * numel)  # every rank gets all of the mean
        self._time.run(REDUCE, ("bucket", index), seconds, keys)

    def _bring(self, tile: TileJob, number: int, last: bool) -> None:
        """Copy a tile's gradients of one backward to the host, and add them to those of earlier backwards."""
        num_bytes = tile.gradient_bytes
        if self._layout.sums_on_device:
            if not last:
                return
            num_bytes = _FLOAT_BYTES * tile.numel
        seconds = num_bytes / self._machine.to_host_bytes_per_s if self._copies else 0.0
        self._time.run(COPY_TO_HOST, tile.key, seconds, tile.sources)
        if number > 0 and self._each_backward and not self._layout.sums_on_device:
            num_bytes = self._sum_bytes(tile.numel, tile.gradient_bytes / tile.numel, number)
            self._time.run(ADD, tile.key, self._pass_s(num_bytes))
        if last and self._offloads and (tile.ahead or self._early_norms):
            self._ahead.append(tile)

    @staticmethod
    def _sum_bytes(numel: int, itemsize: float, number: int) -> float:
        """Return the bytes to add a gradient to a float32 sum; the second backward also converts the first one."""
        made = itemsize + _FLOAT_BYTES if number == 1 else 0
        return numel * (made + itemsize + 2 * _FLOAT_BYTES)

    # -- the end of the window ------------------------------------------------

    def _norm(self) -> None:
        """Simulate passes ahead, the norm, and the passes ahead that had not begun when the norm was asked for."""
        clips = self._job.clipping is not None
        asked, delayed = self._time.ready(NORM, ()), []

        def step_ahead(tile: TileJob) -> None:
            self._time.run(STEP_AHEAD, tile.key, _OUT_OF_PLACE * self._pass_s(self._passes[tile.key]))

        for tile in self._ahead:
            if self._early_norms:
                self._time.run(MEASURE, tile.key, self._read_s(tile.gradient_bytes))
            if tile.ahead and clips and self._time.begins(STEP_AHEAD, (tile.key,)) >= asked:
                delayed.append(tile)
            elif tile.ahead:
                step_ahead(tile)
        seconds = self._machine.bookkeeping_s * len(self._trainable)
        if self._sharded:
            seconds += self._machine.latency_s
        if clips and not self._early_norms:
            seconds += self._read_s(sum(tile.gradient_bytes for tile in self._all_tiles))
        self._time.run(NORM, "norm", seconds)
        for tile in delayed:
            step_ahead(tile)

    def _commit(self) -> None:
        self._step_matrices()
        for home in self._layout.homes[:-1]:
            # Gradients and parameters are in 16 bits.
            num_bytes = sum(run.tiles * (home.pass_bytes(run) + 6 * run.numel) for run in home.runs)
            self._time.run(STEP_ON_DEVICE, "device", self._device_s(num_bytes))
        for tile in self._tiles:
            if tile.ahead:
                self._publish(tile)
        remaining = [tile for tile in self._tiles if not tile.ahead]
        for move, index in commit_moves(len(remaining)):
            if move is Move.FINISH:
                self._time.run(STEP_IN_PLACE, remaining[index].key, self._pass_s(remaining[index].num_bytes))
                self._publish(remaining[index])
        if self._sharded and self._stage in (1, 2):
            for index, bucket in enumerate(self._layout.buckets):
                most = DEVICE_GATHER_NUMEL if self._machine.staged else GATHER_NUMEL
                num_bytes, meetings = bucket.numel * bucket.dtype.itemsize, -(-bucket.numel // most)
                self._time.run(GATHER, index, self._exchange_s(num_bytes, meetings))

    def _step_matrices(self) -> None:
        """Simulate the passes over matrices, with the transformations between them."""
        transformed: dict[int, float] = {}
        for move, place in commit_moves(len(self._matrices), MATRICES_UNDER_WAY):
            matrix = self._matrices[place]
            key, ahead = matrix.tiles.key, matrix.tiles.ahead
            if move is Move.FILL:
                ready = 0.0 if ahead else self._time.run(STEP_IN_PLACE, key, self._pass_s(matrix.first_bytes))
                if matrix.sent_bytes:
                    seconds = self._way_s(matrix, self._machine.to_device_bytes_per_s)
                    ready = self._time.run(EXCHANGE, key, seconds, not_before=ready)
                transformed[place] = self._time.run(TRANSFORM, key, self._transform_s(matrix), not_before=ready)
                continue
            ready = transformed[place]
            if matrix.sent_bytes:
                way_s = self._way_s(matrix, self._machine.to_host_bytes_per_s)
                ready = self._time.run(EXCHANGE, key, way_s, not_before=ready)
            seconds = (_OUT_OF_PLACE if ahead else 1.0) * self._pass_s(matrix.last_bytes)
            self._time.run(STEP_IN_PLACE, key, seconds, not_before=ready)
            copied = self._copies and not self._streams
            published = matrix.tiles.parameter_bytes / self._machine.to_device_bytes_per_s if copied else 0.0
            self._time.run(PUBLISH, key, published)

    def _publish(self, tile: TileJob) -> None:
        seconds = 0.0  # a pass in place writes parameters in host memory itself
        if self._copies and not self._streams:
            seconds = tile.parameter_bytes / self._machine.to_device_bytes_per_s
        elif tile.ahead:
            seconds = self._host_s(2 * tile.parameter_bytes)
        self._time.run(PUBLISH, tile.key, seconds)

    # -- how long things take -------------------------------------------------

    def _pass_s(self, num_bytes: float) -> float:
        """Return the time of a pass over memory where the optimizer's state is: states, sums of gradients."""
        return self._device_s(num_bytes) if self._device_steps else self._host_s(num_bytes)

    def _transform_s(self, matrix: MatrixJob) -> float:
        """Return the time of transformations and, of one rank, of the copies to where they run, and back."""
        machine, speed = self._machine, self._machine.transform_flops
        if speed is None or (machine.staged and self._layout.transforms_on_host):
            return 0.0  # not known
        seconds = matrix.operations / speed
        if self._copies and not matrix.sent_bytes:
            seconds += matrix.part_bytes * (1 / machine.to_device_bytes_per_s + 1 / machine.to_host_bytes_per_s)
        return seconds

    def _way_s(self, matrix: MatrixJob, copied_bytes_per_s: float) -> float:
        """Return the time of one way of parts, between ranks and between host and device."""
        seconds = self._exchange_s(matrix.sent_bytes, 2 * matrix.batches)  # the ranks meet before they send
        return seconds + (matrix.part_bytes / copied_bytes_per_s if self._copies else 0.0)

    def _read_s(self, num_bytes: float) -> float:
        if self._device_steps:
            return self._device_s(num_bytes)
        return num_bytes * self._machine.ranks_per_host / self._machine.host_norm_bytes_per_s

    def _host_s(self, num_bytes: float) -> float:
        return num_bytes * self._machine.ranks_per_host / self._machine.host_bytes_per_s

    def _device_s(self, num_bytes: float) -> float:
        return num_bytes / self._machine.device_memory_bytes_per_s

    def _gather_s(self, num_bytes: float) -> float:
        if self._machine.staged:
            return self._exchange_s(num_bytes)
        # Each rank writes its shard into memory that all ranks see, and FSDP2 copies all shards out of it.
        return self._exchange_s(num_bytes / self._machine.ranks) + num_bytes / self._machine.unshard_bytes_per_s

    def _exchange_s(self, num_bytes: float, meetings: int = 1, bytes_per_s: float | None = None) -> float:
        ranks, speed = self._machine.ranks, bytes_per_s or self._machine.exchange_bytes_per_s
        return meetings * self._machine.latency_s + num_bytes * (ranks - 1) / ranks / speed

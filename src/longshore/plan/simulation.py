"""One step of training, simulated by the schedule that the engine steps by.

The tables of :mod:`longshore.host.events` and :mod:`longshore.sharding.stages` say which lane an event takes and
what it waits for, and ``commit_moves`` in which order a commit goes; here are only how long each takes, and the order
in which backward asks for them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from longshore.host.events import (
    ARRIVE,
    COPY_TO_HOST,
    NORM,
    PIPELINE_DEPTH,
    PUBLISH,
    SCHEDULE,
    STEP_AHEAD,
    STEP_IN_PLACE,
    Lane,
    Move,
    Row,
    Which,
    commit_moves,
)
from longshore.plan.choice import Choice, Job
from longshore.plan.layout import PlannedBucket, RankLayout, lay_out
from longshore.plan.machine import PlanMachine
from longshore.plan.model import PlannedModel
from longshore.plan.timeline import Span, Timeline
from longshore.plan.workload import Segment, TileJob, segments_of, tile_jobs
from longshore.sharding.ownership import GATHER_NUMEL
from longshore.sharding.reduction import SLICE_NUMEL
from longshore.sharding.stages import GATHER, REDUCE, SHARDED_SCHEDULE, reduces_each_backward

FORWARD, GATHER_TO_USE, ADD, MEASURE, STEP_ON_DEVICE, RELEASE = (
    "forward",
    "gather to use",
    "add",
    "measure early",
    "step on the device",
    "release",
)
_BESIDE: Mapping[str, Row] = {
    FORWARD: Row(Lane.COMPUTE),
    GATHER_TO_USE: Row(Lane.COLLECTIVES),
    ADD: Row(Lane.HOST, ((COPY_TO_HOST, Which.SAME),)),
    MEASURE: Row(Lane.HOST, ((COPY_TO_HOST, Which.SAME),)),
    STEP_ON_DEVICE: Row(Lane.COMPUTE, ((NORM, Which.ALL),)),
    RELEASE: Row(Lane.COMPUTE, ((PUBLISH, Which.ALL),)),
}
"""What the tables of the engine's own steps do not have."""

_MOST_BACKWARDS = 3
"""That are simulated; those between the first and the last are alike."""
_OUT_OF_PLACE = 0.93 / 0.74
"""Of a pass in place, what one into a spare page takes (docs/results: shares of the bandwidth that both reach)."""
_STATE_BYTES = 8
"""Of an element of a page's array: read and written, float32."""


@dataclass(frozen=True)
class Simulation:
    """What one step takes on one rank, in seconds.

    Attributes:
        step_s: from the first forward to the end of ``step()``.
        exposed_s: of that, after the last backward: the norm and ``step()``, as ``longshore.trace`` counts it.
        compute_s: forward and backward alone.
        busy_s: by lane.
        spans: of all events, for pictures; of accumulated backwards only the last ones.
        jobs: that were simulated.
    """

    step_s: float
    exposed_s: float
    compute_s: float
    busy_s: Mapping[str, float]
    spans: tuple[Span, ...]
    jobs: int


def simulate(
    model: PlannedModel, machine: PlanMachine, job: Job, choice: Choice, layout: RankLayout | None = None
) -> Simulation:
    """Run one step; ``layout`` is that of :func:`~longshore.plan.layout.lay_out`, where it is there already."""
    if layout is None:
        layout = lay_out(model, job, choice, machine.ranks, machine.staged)
    return _Step(model.cast(job.dtype), machine, job, choice, layout).run()


class _Step:
    def __init__(self, model: PlannedModel, machine: PlanMachine, job: Job, choice: Choice, layout: RankLayout) -> None:
        # Fixed.
        self._machine = machine
        self._job = job
        self._choice = choice
        self._layout = layout
        self._sharded = machine.ranks > 1
        self._each_backward = not self._sharded or reduces_each_backward(choice.stage)
        self._gathers = self._sharded and choice.stage == 3
        self._offloads = choice.offload == "cpu"
        self._copies = machine.staged and self._offloads
        self._segments = segments_of(model)
        self._tiles = tile_jobs(job, choice, layout, self._segments)
        self._trainable = model.trainable
        # Gradients themselves; sums of several backwards take their place.
        self._kept_to_the_end = job.accumulation == 1 and not (self._sharded and self._each_backward)
        self._sums = self._sharded and not self._each_backward and job.accumulation > 1
        self._early_norms = self._offloads and bool(choice.speculation) and job.clipping is not None
        self._time = Timeline({**(SHARDED_SCHEDULE if self._sharded else SCHEDULE), **_BESIDE}, self._shared_lanes())
        # Of a backward.
        self._ahead: list[TileJob] = []

    def _shared_lanes(self) -> dict[Lane, Lane]:
        if not self._machine.staged:  # the same CPUs do all of it
            return {Lane.HOST: Lane.COMPUTE, Lane.COLLECTIVES: Lane.COMPUTE}
        return {} if self._offloads else {Lane.HOST: Lane.COMPUTE}

    def run(self) -> Simulation:
        backwards = min(self._job.accumulation, _MOST_BACKWARDS)
        ends = []
        for number in range(backwards):
            self._forward()
            self._backward(number, last=number == backwards - 1)
            ends.append(self._time.last(ARRIVE))
        self._norm()
        self._commit()
        skipped = (self._job.accumulation - backwards) * (ends[1] - ends[0]) if backwards > 2 else 0.0
        step, computed = self._time.end + skipped, ends[-1] + skipped
        busy = {lane.value: seconds for lane, seconds in self._time.busy.items() if seconds > 0}
        compute = sum(span.end_s - span.begin_s for span in self._time.spans if span.name in (FORWARD, ARRIVE))
        compute *= self._job.accumulation / backwards
        return Simulation(step, step - computed, compute, busy, tuple(self._time.spans), len(self._time.spans))

    # -- forward and backward -------------------------------------------------

    def _forward(self) -> None:
        begun = self._time.last(ARRIVE)
        used: list[float] = []
        gathered_root = begun
        if self._gathers:
            root = sum(segment.gathered_bytes for segment in self._segments if segment.unit is None)
            gathered_root = self._time.run(GATHER_TO_USE, "root", self._gather_s(root), not_before=begun)
        for segment in self._segments:
            ready = gathered_root
            if self._gathers and segment.unit is not None:
                ready = self._gather(segment, used)
            used.append(self._time.run(FORWARD, segment.key, self._forward_s(segment), not_before=ready))

    def _gather(self, segment: Segment, used: list[float]) -> float:
        # One unit ahead of the one that is used.
        free = used[-2] if len(used) > 1 else 0.0
        return self._time.run(GATHER_TO_USE, segment.key, self._gather_s(segment.gathered_bytes), not_before=free)

    def _forward_s(self, segment: Segment) -> float:
        return self._machine.compute.forward_s(segment.work, self._job.tokens, self._job.seq_len)

    def _backward_s(self, segment: Segment) -> float:
        seconds = self._machine.compute.backward_s(segment.work, self._job.tokens, self._job.seq_len)
        if self._job.checkpointing and segment.unit is not None:
            seconds += self._forward_s(segment)
        if not self._kept_to_the_end:
            seconds += self._machine.compute.release_s(segment.work, self._job.tokens)
        return seconds + self._machine.arrival_s * len(segment.parameters)

    def _backward(self, number: int, last: bool) -> None:
        launches = self._sharded and (self._each_backward or last)
        missing = [len(bucket.parameters) for bucket in self._layout.buckets]
        bucket_of = {place: index for index, bucket in enumerate(self._layout.buckets) for place in bucket.parameters}
        tiles_of: dict[Hashable, list[TileJob]] = {}
        waiting = {tile.key: len(tile.sources) for tile in self._tiles}
        for tile in self._tiles:
            for source in tile.sources:
                tiles_of.setdefault(source, []).append(tile)
        brought_by: dict[int, list[int]] = {}
        used: list[float] = []
        following = 0

        def came(source: Hashable) -> None:
            for tile in tiles_of.get(source, ()):
                waiting[tile.key] -= 1
                if waiting[tile.key] == 0:
                    self._bring(tile, number, last)

        for segment in reversed(self._segments):
            ready = self._gather(segment, used) if self._gathers and segment.unit is not None else 0.0
            seconds = self._backward_s(segment) + (self._sum_s(segment, number) if self._sums else 0.0)
            used.append(self._time.run(ARRIVE, segment.key, seconds, not_before=ready))
            if not self._sharded:
                came(segment.key)
                continue
            for place in segment.parameters:
                missing[bucket_of[place]] -= 1
                brought_by.setdefault(bucket_of[place], []).append(segment.key)
            while launches and following < len(missing) and missing[following] == 0:
                self._reduce(following, self._layout.buckets[following], brought_by[following])
                came(("bucket", following))
                following += 1

    def _sum_s(self, segment: Segment, number: int) -> float:
        """At stages 0 and 1 float32 sums stay where the gradients are."""
        num_bytes = 0
        for each in (self._trainable[place] for place in segment.parameters if number > 0):
            itemsize = each.dtype.itemsize
            made = itemsize + 4 if number == 1 else 0  # of the gradient that was there before
            num_bytes += each.numel * (made + itemsize + 8)
        return self._device_s(num_bytes) if self._machine.staged else self._host_s(num_bytes)

    def _reduce(self, index: int, bucket: PlannedBucket, keys: list[int]) -> None:
        itemsize = bucket.dtype.itemsize
        if self._job.accumulation > 1 and not self._each_backward:
            itemsize = 4  # sums
        seconds = self._reduce_s(bucket.numel, itemsize)
        if self._choice.stage == 0:
            seconds += self._exchange_s(4 * bucket.numel)  # and every rank gets all of it
        self._time.run(REDUCE, ("bucket", index), seconds, keys)

    def _bring(self, tile: TileJob, number: int, last: bool) -> None:
        num_bytes = tile.numel * tile.gradient_itemsize
        seconds = num_bytes / self._machine.to_host_bytes_per_s if self._copies else 0.0
        self._time.run(COPY_TO_HOST, tile.key, seconds, tile.sources)
        if number > 0 and self._each_backward:
            # The sum is read and written; the first time it is made of the gradient that was there before.
            made = num_bytes + 4 * tile.numel if number == 1 else 0
            self._time.run(ADD, tile.key, self._host_s(made + num_bytes + 8 * tile.numel))
        if last and self._offloads and (tile.ahead or self._early_norms):
            self._ahead.append(tile)

    # -- the end of the window ------------------------------------------------

    def _norm(self) -> None:
        """What was stepped ahead, the norm, and those passes that had not begun when it was asked for."""
        asked, put_off = self._time.ready(NORM, ()), []
        for tile in self._ahead:
            if self._early_norms:
                self._time.run(MEASURE, tile.key, self._read_s(tile.numel * tile.gradient_itemsize))
            if not tile.ahead:
                continue
            if self._job.clipping is not None and self._time.begins(STEP_AHEAD, (tile.key,)) >= asked:
                put_off.append(tile)
            else:
                self._step_ahead(tile)
        left = 0 if self._early_norms else sum(tile.numel * tile.gradient_itemsize for tile in self._tiles)
        meeting = self._machine.latency_s if self._sharded else 0.0
        measures = self._job.clipping is not None
        bookkeeping = self._machine.bookkeeping_s * len(self._trainable)
        self._time.run(NORM, "norm", meeting + bookkeeping + (self._read_s(left) if measures else 0.0))
        for tile in put_off:
            self._step_ahead(tile)

    def _step_ahead(self, tile: TileJob) -> None:
        self._time.run(STEP_AHEAD, tile.key, _OUT_OF_PLACE * self._pass_s(tile))

    def _commit(self) -> None:
        on_device = sum(group.run.tiles * group.run.numel for group in self._layout.device)
        if on_device and self._layout.host:
            self._time.run(STEP_ON_DEVICE, "device", self._device_s(on_device * (self._state_bytes + 6)))
        kept = [tile for tile in self._tiles if tile.ahead and self._offloads]
        for tile in kept:
            self._publish(tile)
        remaining = [tile for tile in self._tiles if not (tile.ahead and self._offloads)]
        for move, place in commit_moves(len(remaining), PIPELINE_DEPTH):
            if move is Move.FINISH:
                self._time.run(STEP_IN_PLACE, remaining[place].key, self._pass_s(remaining[place]))
                self._publish(remaining[place])
        if self._sharded and self._choice.stage in (1, 2):
            for index, bucket in enumerate(self._layout.buckets):
                num_bytes, meetings = bucket.numel * bucket.dtype.itemsize, -(-bucket.numel // GATHER_NUMEL)
                self._time.run(GATHER, index, self._exchange_s(num_bytes, meetings))
        if self._kept_to_the_end:
            released = sum(self._machine.compute.release_s(each.work, self._job.tokens) for each in self._segments)
            self._time.run(RELEASE, "gradients", released)

    def _publish(self, tile: TileJob) -> None:
        num_bytes = tile.numel * tile.itemsize
        if self._copies:
            seconds = num_bytes / self._machine.to_device_bytes_per_s
        else:  # a pass in place wrote the parameter itself
            seconds = self._host_s(2 * num_bytes) if tile.ahead and self._offloads else 0.0
        self._time.run(PUBLISH, tile.key, seconds)

    # -- how long -------------------------------------------------------------

    @property
    def _state_bytes(self) -> int:
        return _STATE_BYTES * self._job.page_arrays

    def _pass_s(self, tile: TileJob) -> float:
        num_bytes = tile.numel * (self._state_bytes + tile.gradient_itemsize + tile.itemsize)
        if self._machine.staged and not self._offloads:
            return self._device_s(num_bytes)
        return self._host_s(num_bytes)

    def _host_s(self, num_bytes: float) -> float:
        return num_bytes * self._machine.ranks_per_host / self._machine.host_bytes_per_s

    def _read_s(self, num_bytes: float) -> float:
        if self._machine.staged and not self._offloads:
            return self._device_s(num_bytes)
        return num_bytes * self._machine.ranks_per_host / self._machine.host_norm_bytes_per_s

    def _device_s(self, num_bytes: float) -> float:
        return num_bytes / self._machine.device_memory_bytes_per_s

    def _reduce_s(self, numel: int, itemsize: int) -> float:
        speed = self._machine.reduce_bytes_per_s or self._machine.exchange_bytes_per_s
        return self._exchange_s(numel * itemsize, -(-numel // SLICE_NUMEL), speed)

    def _gather_s(self, num_bytes: float) -> float:
        if self._machine.staged:
            return self._exchange_s(num_bytes)
        # Each rank writes its part into memory that all see, and FSDP2 copies the whole out of it.
        return self._exchange_s(num_bytes / self._machine.ranks) + num_bytes / self._machine.unshard_bytes_per_s

    def _exchange_s(self, num_bytes: float, meetings: int = 1, bytes_per_s: float | None = None) -> float:
        ranks, speed = self._machine.ranks, bytes_per_s or self._machine.exchange_bytes_per_s
        return meetings * self._machine.latency_s + num_bytes * (ranks - 1) / ranks / speed

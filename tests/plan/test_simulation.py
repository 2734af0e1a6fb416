"""Steps whose times can be told by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from longshore.plan import simulation
from longshore.plan.job import Job, PlanChoice, PlannedModel, PlannedParameter, Use
from longshore.plan.machine import PlanMachine, Seconds, Work
from longshore.plan.simulation import (
    FETCH,
    FORWARD,
    GATHER,
    GATHER_TO_USE,
    REDUCE,
    SHARDED_SCHEDULE,
    EventSimulator,
    Simulation,
    simulate,
)
from longshore.tiles.events import (
    ARRIVE,
    COPY_TO_HOST,
    NORM,
    PUBLISH,
    SCHEDULE,
    STEP_AHEAD,
    STEP_IN_PLACE,
    Row,
    Track,
    Which,
)
from plan.models import EIGHT, machine


class Clockwork:
    """A second forward and two backward for each segment that multiplies."""

    def seconds(self, work: Work, tokens: int, seq_len: int) -> Seconds:
        return Seconds(1.0, 2.0) if work.multiplied else Seconds(0.0, 0.0)


N = 1 << 20
"""Elements of a layer, and of a tile."""
HOST = N * 28.0
"""Bytes a second that step one bfloat16 tile in one second."""


def layers(count: int) -> PlannedModel:
    import torch

    made = [PlannedParameter(f"{each}", (N // 64, 64), torch.bfloat16, Use.MULTIPLIED, each) for each in range(count)]
    return PlannedModel("layers", tuple(made), 64)


def clock(**figures: Any) -> PlanMachine:
    usual = {
        "host_bytes_per_s": HOST,
        "host_norm_bytes_per_s": 1e30,
        "bookkeeping_s": 0.0,
        "to_host_bytes_per_s": 1e30,
        "to_device_bytes_per_s": 2.0 * N,
        "latency_s": 0.0,
    }
    return replace(machine(), compute=Clockwork(), **{**usual, **figures})


JOB = Job(1, 16, clipping=1.0, tile_numel=N)


def run(count: int, choice: PlanChoice, job: Job = JOB, **figures: Any) -> Simulation:
    return simulate(layers(count), clock(**figures), job, choice)


def spans(found: Simulation, name: str) -> list[tuple[float, float]]:
    return [(round(each.begin_s, 6), round(each.end_s, 6)) for each in found.spans if each.name == name]


def test_in_place_everything_waits_for_the_verdict() -> None:
    found = run(3, PlanChoice(0, "cpu"))
    assert found.compute_s == 9.0
    assert spans(found, STEP_IN_PLACE) == [(9, 10), (10, 11), (11, 12)]
    # A copy of one second behind each pass; the track is another.
    assert spans(found, PUBLISH) == [(10, 11), (11, 12), (12, 13)]
    assert (found.step_s, found.exposed_s) == pytest.approx((13.0, 4.0))


def test_ahead_passes_run_beside_backward_and_publishing_waits() -> None:
    found = run(3, PlanChoice(0, "cpu", speculation="100%"))
    longer = 0.93 / 0.74
    # Backward brings the last layer's gradient first, at 3 + 2 seconds.
    assert spans(found, STEP_AHEAD) == [(round(at, 6), round(at + longer, 6)) for at in (5.0, 7.0, 9.0)]
    first = 9.0 + longer
    assert spans(found, PUBLISH) == [(round(first + at, 6), round(first + at + 1, 6)) for at in range(3)]
    assert found.exposed_s == pytest.approx(longer + 3)


def test_some_spares_are_those_of_the_last_tiles() -> None:
    found = run(3, PlanChoice(0, "cpu", speculation="34%"))
    assert len(spans(found, STEP_AHEAD)) == 1 and spans(found, STEP_AHEAD)[0][0] == 5.0
    assert spans(found, STEP_IN_PLACE) == [(9, 10), (10, 11)]


def test_passes_that_have_not_begun_at_the_verdict_go_behind_the_norm() -> None:
    slow = replace(clock(), host_bytes_per_s=HOST / 10, host_norm_bytes_per_s=2.0 * N * 4)
    found = simulate(layers(3), slow, JOB, PlanChoice(0, "cpu", speculation="100%"))
    ends = spans(found, STEP_AHEAD)
    assert ends[0][0] == 5.25  # measured first
    assert ends[1][0] >= ends[0][1]
    # Measuring goes ahead of what had not begun.
    measured = spans(found, "measure early")
    assert len(measured) == 3 and measured[-1][1] <= ends[1][0]


@pytest.mark.parametrize("job", [JOB, replace(JOB, accumulation=2)])
def test_what_each_parameter_takes(job: Job) -> None:
    """Hooks lengthen backward; the rest of Python's work lengthens the norm."""
    here = replace(clock(), staged=False, host_bytes_per_s=1e30)
    slow = replace(here, arrival_s=0.1, bookkeeping_s=0.01)
    found = simulate(layers(3), slow, job, PlanChoice(0, "cpu"))
    assert found.compute_s == pytest.approx(job.accumulation * (9.0 + 0.3))
    assert found.exposed_s == pytest.approx(0.03)


def test_copies_are_waited_for() -> None:
    found = run(2, PlanChoice(0, "cpu"), to_host_bytes_per_s=2.0 * N / 5)
    assert spans(found, COPY_TO_HOST) == [(4, 9), (9, 14)]
    assert spans(found, STEP_IN_PLACE)[0] == (14, 15)


def test_without_offload_the_device_steps() -> None:
    found = run(2, PlanChoice(0, "none"), device_memory_bytes_per_s=N * 28.0)
    # And reads the gradients for their norm: 2 of 28 bytes.
    assert found.exposed_s == pytest.approx(2 + 2 * 2 / 28)
    assert {span.track for span in found.spans} == {Track.COMPUTE}


@pytest.mark.parametrize("accumulation", [2, 3, 4, 5, 6, 100])
def test_without_offload_the_device_adds(accumulation: int) -> None:
    """A second to make the sum of a layer, 10 / 16 of one to add to it. The last one comes behind backward."""
    job = replace(JOB, accumulation=accumulation)
    found = run(2, PlanChoice(0, "none"), job, device_memory_bytes_per_s=N * 16.0, host_bytes_per_s=1.0)
    last = 1.0 if accumulation == 2 else 10 / 16
    sums = 2 * (1.0 + (accumulation - 2) * 10 / 16)
    assert found.compute_s == pytest.approx(6.0 * accumulation + sums - last)
    assert found.exposed_s == pytest.approx(last + 2 * 28 / 16 + 2 * 2 / 16)
    assert found.step_s == pytest.approx(found.compute_s + found.exposed_s)
    assert found.busy_s == {Track.COMPUTE.value: pytest.approx(found.step_s)}


@pytest.mark.covering(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("place", "staged"), [("none", True), ("cpu", True), ("cpu", False)])
def test_steps_of_many_backwards_are_as_if_all_were_simulated(
    stage: int, place: Any, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, ranks = replace(JOB, accumulation=9), {"ranks": 2, "ranks_per_host": 2, "staged": staged}
    quick = run(3, PlanChoice(stage, place), job, exchange_bytes_per_s=3.0 * N, **ranks)
    monkeypatch.setattr(simulation, "_MOST_BACKWARDS", 100)
    whole = run(3, PlanChoice(stage, place), job, exchange_bytes_per_s=3.0 * N, **ranks)
    assert len(whole.spans) > len(quick.spans)
    for name in ("step_s", "exposed_s", "compute_s", "waited_s"):
        assert getattr(quick, name) == pytest.approx(getattr(whole, name)), name
    assert quick.busy_s == pytest.approx(whole.busy_s)
    assert whole.step_s == pytest.approx(whole.compute_s + whole.waited_s + whole.exposed_s)


def test_a_part_on_the_device_is_stepped_beside_the_host() -> None:
    found = run(4, PlanChoice(0, "cpu", ratio=0.5), device_memory_bytes_per_s=2 * N * 15.0)
    on_device = spans(found, "step on the device")
    assert len(spans(found, STEP_IN_PLACE)) == 2 and on_device[0][0] == 12.0
    assert found.step_s == pytest.approx(max(15.0, on_device[0][1]))


def test_a_step_that_is_all_on_the_device_takes_its_time() -> None:
    found = run(4, PlanChoice(0, "cpu", ratio=0.0), device_memory_bytes_per_s=2 * N * 15.0)
    ((begin, end),) = spans(found, "step on the device")
    assert spans(found, STEP_IN_PLACE) == [] and begin == 12.0 < end == found.step_s


def test_in_host_memory_one_thing_runs_at_a_time() -> None:
    here = replace(clock(), staged=False)
    found = simulate(layers(3), here, JOB, PlanChoice(0, "cpu"))
    assert found.exposed_s == pytest.approx(3.0) and spans(found, COPY_TO_HOST) == []
    ordered = sorted(found.spans, key=lambda span: span.begin_s)
    assert all(left.end_s <= right.begin_s + 1e-9 for left, right in pairwise(ordered))


def test_accumulated_backwards() -> None:
    for accumulation in (2, 3, 7):
        found = run(3, PlanChoice(0, "cpu"), replace(JOB, accumulation=accumulation))
        assert found.compute_s == pytest.approx(9.0 * accumulation)
        assert found.step_s - found.exposed_s == pytest.approx(9.0 * accumulation)
        # The additions of the last backward are waited for.
        assert found.exposed_s >= 4.0


@pytest.mark.parametrize("stage", range(4))
def test_two_ranks(stage: int) -> None:
    job = replace(JOB, bucket_numel=N if stage < 2 else 2 * N)
    found = run(4, PlanChoice(stage, "cpu"), job, ranks=2, ranks_per_host=1, exchange_bytes_per_s=N * 1.0)
    reduced = spans(found, REDUCE)
    # A bucket has a layer; half of it goes out, in bfloat16.
    each = 1.0 if stage else 3.0
    first = 6.0 if stage < 3 else 7.0  # the first layer has to be gathered
    assert reduced[0] == (first, first + each) and len(reduced) == 4
    assert len(spans(found, GATHER)) == (4 if stage in (1, 2) else 0)
    if stage in (1, 2):
        assert spans(found, GATHER)[0][0] == max(end for _, end in spans(found, PUBLISH))
    gathers = spans(found, "gather to use")
    assert len(gathers) == (8 if stage == 3 else 0)  # for forward and for backward
    if stage == 3:
        forward = spans(found, FORWARD)
        assert forward[0][0] == gathers[0][1] and gathers[1][0] == gathers[0][1]
        assert gathers[2][0] >= forward[0][1]  # no more than one ahead


def test_ranks_without_devices_also_add_up_and_copy_out() -> None:
    job = replace(JOB, bucket_numel=N)
    slow = {"exchange_bytes_per_s": N * 1.0, "reduce_bytes_per_s": N / 3, "unshard_bytes_per_s": 2.0 * N}
    found = run(4, PlanChoice(2, "cpu"), job, ranks=2, ranks_per_host=1, staged=False, **slow)
    # Half of each bucket goes out, in bfloat16.
    assert [end - begin for begin, end in spans(found, REDUCE)] == pytest.approx([3.0] * 4)
    assert [end - begin for begin, end in spans(found, GATHER)] == pytest.approx([1.0] * 4)
    found = run(4, PlanChoice(3, "cpu"), job, ranks=2, ranks_per_host=1, staged=False, **slow)
    # Its own half is written where the other rank sees it, and all of it is copied.
    assert [end - begin for begin, end in spans(found, "gather to use")] == pytest.approx([0.5 + 1.0] * 8)


@pytest.mark.parametrize("staged", [False, True])
def test_each_slice_of_a_reduction_is_a_meeting(staged: bool) -> None:
    meeting = {"ranks": 2, "ranks_per_host": 1, "exchange_bytes_per_s": 1e30, "latency_s": 0.25, "staged": staged}
    found = run(12, PlanChoice(2, "cpu"), replace(JOB, bucket_numel=12 * N), **meeting)
    # Two buckets of 6 Mi elements, reduced in slices of 4 Mi, gathered in those of 8; on devices at once.
    meetings = 1 if staged else 2
    assert [end - begin for begin, end in spans(found, REDUCE)] == pytest.approx([meetings * 0.25] * 2)
    assert [end - begin for begin, end in spans(found, GATHER)] == pytest.approx([0.25] * 2)


@pytest.mark.parametrize("stage", [0, 1])
def test_sums_of_several_backwards_take_their_time(stage: int) -> None:
    ranks = {
        "ranks": 2,
        "ranks_per_host": 1,
        "staged": False,
        "exchange_bytes_per_s": 1e30,
        "host_bytes_per_s": 14.0 * N,
    }
    found = run(1, PlanChoice(stage, "cpu"), replace(JOB, accumulation=3), **ranks)
    # bfloat16 is read, and a sum read and written; the second backward first makes it of what was there.
    arrivals = [end - begin for begin, end in spans(found, ARRIVE)]
    assert arrivals == pytest.approx([2.0, 2.0 + 16 / 14, 2.0 + 10 / 14])


def test_no_more_than_one_unit_is_gathered_ahead() -> None:
    found = run(4, PlanChoice(3, "cpu"), ranks=2, ranks_per_host=1, exchange_bytes_per_s=N * 100.0)
    gathers, forward = spans(found, "gather to use"), spans(found, FORWARD)
    assert gathers[1][0] < forward[0][1] <= gathers[2][0] < forward[1][1] <= gathers[3][0]


def test_the_table_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator knows what waits for what from the engine's table, and from nowhere else."""
    patient = run(3, PlanChoice(0, "cpu"))
    assert spans(patient, PUBLISH)[0] == (10, 11)
    hasty = {**SCHEDULE, PUBLISH: Row(Track.TO_DEVICE, ((COPY_TO_HOST, Which.SAME),))}
    monkeypatch.setattr("longshore.plan.simulation.SCHEDULE", hasty)
    assert spans(run(3, PlanChoice(0, "cpu")), PUBLISH)[0] == (
        9,
        10,
    )  # tile 0 has the first layer


def test_the_tables_agree() -> None:
    assert {NORM, ARRIVE, PUBLISH} <= set(SHARDED_SCHEDULE)
    for row in SHARDED_SCHEDULE.values():
        assert all(before in SHARDED_SCHEDULE for before, _ in row.after)
    # Several ranks add to what one waits for, and take nothing away but the way to the host.
    for name, row in SCHEDULE.items():
        if name != COPY_TO_HOST:
            assert set(row.after) <= set(SHARDED_SCHEDULE[name].after)


def test_a_track_is_a_queue() -> None:
    table = {
        "a": Row(Track.HOST),
        "b": Row(Track.HOST, (("a", Which.SAME),)),
        "c": Row(Track.COMPUTE, (("b", Which.ALL),)),
    }
    line = EventSimulator(table, {})
    assert line.run("a", 1, 2.0) == 2.0
    assert line.run("b", 2, 1.0, keys=(1,)) == 3.0
    assert line.run("a", 3, 1.0) == 4.0  # behind b, though it waits for nothing
    assert line.begins("c", ()) == 3.0 and line.run("c", 9, 1.0, not_before=10.0) == 11.0
    assert line.end == 11.0 and line.busy[Track.HOST] == 4.0


def test_a_faster_machine_is_never_slower() -> None:
    for choice in (PlanChoice(2, "cpu"), PlanChoice(3, "cpu", speculation="100%"), PlanChoice(1, "none")):
        base = machine(gpus=8)
        usual = simulate(EIGHT, base, Job(1, 4096), choice).step_s
        for field in ("host_bytes_per_s", "to_host_bytes_per_s", "to_device_bytes_per_s", "exchange_bytes_per_s"):
            faster = replace(base, **{field: 2 * getattr(base, field)})
            assert simulate(EIGHT, faster, Job(1, 4096), choice).step_s <= usual * (1 + 1e-9)


@pytest.mark.parametrize(("fetch_s", "ends"), [(1, [2, 3, 4, 5]), (2, [3, 5, 7, 9])])
def test_units_are_fetched_while_the_one_before_is_computed(fetch_s: int, ends: list[float]) -> None:
    """Four units; backward finds the last two on the device, and fetches one while it computes the one before."""
    machine = clock(to_device_bytes_per_s=2.0 * N / fetch_s)
    choice = PlanChoice(3, "cpu", param_device="cpu")
    found = simulate(layers(4), machine, Job(tile_numel=N), choice)
    fetched = [span for span in found.spans if span.name == FETCH]
    assert [span.track for span in fetched] == [Track.TO_DEVICE] * 6
    assert [span.end_s for span in found.spans if span.name == FORWARD] == ends
    backward = [ends[-1] + 2 * number for number in (1, 2, 3, 4)]
    assert [span.end_s for span in found.spans if span.name == ARRIVE] == backward
    assert [span.begin_s for span in fetched[-2:]] == backward[:2]
    # Steps write where the parameters rest: nothing is published.
    assert (found.exposed_s, found.waited_s) == (4.0, ends[-1] - 4)
    assert PUBLISH not in {span.name for span in found.spans}


def test_ranks_fetch_their_shards_and_gather_them() -> None:
    machine = clock(to_device_bytes_per_s=N, exchange_bytes_per_s=2.0 * N)
    two = replace(machine, ranks=2, ranks_per_host=2)
    choice = PlanChoice(3, "cpu", param_device="cpu")
    found = simulate(layers(2), two, Job(tile_numel=N), choice)
    spans = {name: [span for span in found.spans if span.name == name] for name in (FETCH, GATHER_TO_USE, FORWARD)}
    # Half of a unit's 2 N bytes goes up in a second; half of them comes from the other rank in half a second.
    assert [(span.begin_s, span.end_s) for span in spans[FETCH][:2]] == [(0, 1), (1, 2)]
    assert [(span.begin_s, span.end_s) for span in spans[GATHER_TO_USE][:2]] == [(1, 1.5), (2, 2.5)]
    assert [span.begin_s for span in spans[FORWARD]] == [1.5, 2.5]
    assert len(spans[FETCH]) == 4

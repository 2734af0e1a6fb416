"""What a trace and a monitor say of a device has the device's times: the host asks early, and sees late."""

from __future__ import annotations

import csv
import itertools
import time
from pathlib import Path

import pytest
import torch
from on_device import device_type, keep_busy
from torch import nn

import longshore
from longshore.accelerator import DeviceClock, current_stream_is
from longshore.optim.rules.muon import MuonRule
from longshore.tiles.events import COPY_TO_HOST, FETCH, PUBLISH, TRANSFORM
from longshore.tracing.events import BACKWARD, DEVICE_TRACK, STEP
from longshore.transfer import DeviceStreams

pytestmark = pytest.mark.gpu

LONG = 1_600_000_000
"""Cycles: about 0.8 seconds."""
LONG_NS = 0.7 * 1e9
SHORT_NS = 0.35 * 1e9


class Training:
    def __init__(self, release: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).to(device_type())
        self.optimizer = longshore.AdamW(self.model.parameters(), release_gradients=release)
        self.step()

    def backward(self) -> None:
        loss = self.model(torch.ones(4, 16, device=device_type())).pow(2).mean()
        keep_busy(LONG)  # the gradients are late, and the host is ahead
        loss.backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("release", [False, True])
def test_the_rest_of_the_backward_is_not_exposed(release: bool, clip: bool) -> None:
    training = Training(release)
    with longshore.trace(training.optimizer) as traced:
        training.backward()
        if clip:
            training.optimizer.clip_grad_norm_(1.0)
        training.optimizer.step()
    exposed_s = traced.summary().exposed_s
    assert exposed_s is not None and 0 < 1e9 * exposed_s < SHORT_NS
    if release:  # else its gradients arrive in step()
        (backward,) = (event for event in traced.events if event.name == BACKWARD)
        assert backward.end_ns - backward.begin_ns > LONG_NS


@pytest.mark.parametrize("late", [1, 5, 9])
def test_a_host_that_sees_an_event_late_has_the_devices_times(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that is busy: it is interrupted between the event and its look at the clock."""
    calls, clock_ns = itertools.count(), time.perf_counter_ns

    def interrupted() -> int:
        if next(calls) == late:
            time.sleep(0.4)
        return clock_ns()

    with monkeypatch.context() as patched:
        patched.setattr(time, "perf_counter_ns", interrupted)
        clock = DeviceClock(torch.device(device_type()))
    before_ns = clock_ns()
    reached_ns = clock.ns_of(clock.mark())
    assert before_ns - 0.2e9 < reached_ns < clock_ns() + 0.2e9


def test_a_copy_begins_when_it_runs() -> None:
    training = Training(True)
    with longshore.trace(training.optimizer) as traced:
        training.step()
    copies = [event for event in traced.events if event.name in (COPY_TO_HOST, PUBLISH)]
    assert sorted(copy.name for copy in copies) == [COPY_TO_HOST, PUBLISH]  # all are small and travel together
    step = next(event for event in traced.events if event.name == STEP)
    for copy in copies:
        assert 0 < copy.end_ns - copy.begin_ns < SHORT_NS
        assert copy.num_bytes == 4 * (2 * 16 + 2 * 16 * 16)
        assert copy.name == COPY_TO_HOST or copy.begin_ns > step.begin_ns


def test_what_the_next_forward_waits_for_is_exposed() -> None:
    training = Training(True)
    transfer = training.optimizer._core.members.store.tiles.streams
    assert isinstance(transfer, DeviceStreams)
    with longshore.trace(training.optimizer) as traced:
        training.backward()
        with current_stream_is(transfer.up.stream):
            keep_busy(LONG)  # behind it the new parameters are late, from when the backward ends
            keep_busy(LONG)
        training.optimizer.step()
    exposed_s = traced.summary().exposed_s
    assert exposed_s is not None and 1e9 * exposed_s > LONG_NS


def test_copies_are_timed_in_a_trace_alone() -> None:
    training = Training(True)
    transfer = training.optimizer._core.members.store.tiles.streams
    assert isinstance(transfer, DeviceStreams)
    with longshore.trace(training.optimizer):
        assert transfer.down.times_copies and transfer.up.times_copies
    assert not transfer.down.times_copies and not transfer.up.times_copies


def test_a_monitor_has_the_devices_times(tmp_path: Path) -> None:
    model = nn.Linear(16, 16).to(device_type())
    config = longshore.Config(
        offload_device="cpu",
        optimizer={"type": "AdamW"},
        csv_monitor={"output_path": str(tmp_path), "job_name": "run"},
    )
    engine = longshore.initialize(model=model, config=config).engine
    for _ in range(2):
        loss = engine(torch.ones(4, 16, device=device_type())).pow(2).mean()
        keep_busy(LONG)
        engine.backward(loss)
        engine.step()
    engine.destroy()
    with open(tmp_path / "run/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    # The first step makes what later ones have.
    assert 0 < 1e9 * float(rows[1]["Time/exposed_s"]) < SHORT_NS


class Streamed:
    """Training of a model whose parameters rest on the host; it knows the order of its blocks."""

    def __init__(self) -> None:
        blocks = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        self.model = nn.Sequential(blocks, nn.Linear(16, 3))
        self.stream = longshore.stream(self.model, device_type())
        self.optimizer = longshore.AdamW(self.model.parameters())
        self.step()

    def step(self) -> None:
        self.model(torch.ones(4, 16, device=device_type())).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("late", [False, True])
def test_parameters_that_go_up_and_what_waits_for_them(late: bool, tmp_path: Path) -> None:
    training = Streamed()
    before = training.stream.counts
    with longshore.trace(training.optimizer) as traced:
        if late:
            with current_stream_is(training.stream._lanes.to_device.stream):
                keep_busy(LONG)
        training.step()
    training.step()  # of which nothing is recorded
    after, summary = training.stream.counts, traced.summary()
    for name, copied in ((FETCH, "fetched_bytes"), (COPY_TO_HOST, "returned_bytes")):
        copies = [event for event in traced.events if event.name == name]
        assert {event.track for event in copies} == {f"stream: {name}"}
        assert sum(event.num_bytes for event in copies) == (getattr(after, copied) - getattr(before, copied)) // 2
        assert all(0 <= event.end_ns - event.begin_ns < SHORT_NS for event in copies)
    assert summary.waited_s is not None and summary.fetched_bytes_per_second is not None
    assert (1e9 * summary.waited_s > LONG_NS) == late
    assert late or 1e9 * summary.waited_s < SHORT_NS
    assert "forward and backward wait" in str(summary) and "parameters to the device" in str(summary)
    traced.save_html(tmp_path / "trace.html")
    assert "stream: parameters to the device" in (tmp_path / "trace.html").read_text()
    training.stream.close()


def test_a_closed_stream_is_not_traced() -> None:
    training = Streamed()
    training.stream.close()
    with longshore.trace(training.optimizer) as traced:
        training.model(torch.ones(4, 16)).square().sum().backward()
        training.optimizer.step()
    assert traced.summary().waited_s is None and "wait" not in str(traced.summary())


@pytest.mark.needs_torch("torch.optim.Muon")
def test_newton_schulz_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host only launches it, and goes on."""
    whole = MuonRule.transform

    def slow(self: MuonRule, matrix: torch.Tensor) -> torch.Tensor:
        keep_busy(LONG)
        return whole(self, matrix)

    monkeypatch.setattr(MuonRule, "transform", slow)
    weight = nn.Parameter(torch.ones(16, 8, device=device_type()))
    optimizer = longshore.Muon([weight])
    with longshore.trace(optimizer) as traced:
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    (event,) = (event for event in traced.events if event.name == TRANSFORM)
    assert event.track == DEVICE_TRACK and event.end_ns - event.begin_ns > LONG_NS

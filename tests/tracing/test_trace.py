"""A trace tells the whole life of each tile, changes no bit, and ends with its block."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import longshore
from longshore.errors import LongshoreError
from longshore.tiles import NO_RECORDER
from longshore.tiles.events import (
    ADD,
    ARRIVE,
    ARRIVE_AGAIN,
    COPY_TO_HOST,
    DISCARD,
    DROPPED,
    KEPT,
    MEASURE,
    NORM,
    PUBLISH,
    REDONE,
    STEP_AHEAD,
    STEP_IN_PLACE,
)
from longshore.tracing import Event, Trace
from longshore.tracing.events import BACKWARD, STEP, STEP_TRACK

TILE = 300
TRANSFERS: dict[str, Callable[[], longshore.SimulatedTransfer | None]] = {
    "direct": lambda: None,
    "simulated-0": lambda: longshore.SimulatedTransfer(seed=0),
    "simulated-1": lambda: longshore.SimulatedTransfer(seed=1),
}


class Training:
    def __init__(self, transfer: str = "simulated-0", memory: int | str = "100%", release: bool = True) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 9))
        self.optimizer = longshore.AdamW(
            self.model.parameters(),
            lr=1e-2,
            release_gradients=release,
            offload=longshore.Offload(
                tile_numel=TILE, transfer=TRANSFERS[transfer](), speculation_memory=memory if release else 0
            ),
        )
        self.tiles = {tile.layout.index for tile in self.optimizer._core.members.store.tiles}
        assert len(self.tiles) > 2

    def backward(self) -> None:
        (self.model(torch.randn(5, 16)) ** 2).mean().backward()

    def train(self, windows: int, backwards: int = 1, clip: float | None = None) -> None:
        for _ in range(windows):
            for _ in range(backwards):
                self.backward()
            if clip is not None:
                self.optimizer.clip_grad_norm_(clip)
            self.optimizer.step()
            self.optimizer.zero_grad()


def windows_of(trace: Trace) -> list[list[Event]]:
    """The events of each window: up to the end of its step."""
    ends = [event.end_ns for event in trace.events if event.name == STEP]
    begins = [0, *ends[:-1]]
    return [
        [event for event in trace.events if begin <= event.begin_ns < end]
        for begin, end in zip(begins, ends, strict=True)
    ]


def of_tile(events: Sequence[Event], tile: int, *names: str) -> list[Event]:
    return [event for event in events if event.tile == tile and event.name in names]


def named(events: Sequence[Event], name: str) -> list[Event]:
    return [event for event in events if event.name == name]


@pytest.fixture
def traced() -> Trace:
    training = Training()
    training.train(2)
    with longshore.trace(training.optimizer) as trace:
        training.train(3, clip=1e9)
    return trace


# -- the life of a tile -------------------------------------------------------


@pytest.mark.quick(0)
@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("memory", [0, "100%"])
@pytest.mark.parametrize("backwards", [1, 2])
def test_each_tile_arrives_is_stepped_and_published_in_this_order(
    transfer: str, memory: int | str, backwards: int
) -> None:
    training = Training(transfer, memory)
    training.train(2, backwards)
    with longshore.trace(training.optimizer) as trace:
        training.train(3, backwards)
    windows = windows_of(trace)
    assert len(windows) == 3
    for events in windows:
        for tile in training.tiles:
            arrivals = of_tile(events, tile, ARRIVE)
            again = of_tile(events, tile, ARRIVE_AGAIN)
            (decided,) = of_tile(events, tile, KEPT, STEP_IN_PLACE)
            assert arrivals
            assert len(again) == (backwards - 1) * len(arrivals)
            assert max(event.begin_ns for event in arrivals + again) <= decided.begin_ns
    # The end of a copy is seen a little late, so a copy is known by its place in its track.
    for tile in training.tiles:
        arrivals = of_tile(trace.events, tile, ARRIVE, ARRIVE_AGAIN)
        copies = of_tile(trace.events, tile, COPY_TO_HOST)
        added = of_tile(trace.events, tile, ADD)
        assert len(added) == len(of_tile(trace.events, tile, ARRIVE_AGAIN))
        assert all(event.end_ns > event.begin_ns and event.track.startswith("longshore-host") for event in added)
        each = len(of_tile(windows[0], tile, ARRIVE))
        # First arrivals, which are small, are copied together; later ones each by itself.
        later = (backwards - 1) * each
        assert len(copies) == (0 if transfer == "direct" else 3 * (1 + later))
        for window in range(3 if copies else 0):
            brought = arrivals[window * (each + later) : (window + 1) * (each + later)]
            copied = copies[window * (1 + later) : (window + 1) * (1 + later)]
            for arrival, one in zip(brought[each - 1 :], copied, strict=True):
                assert arrival.begin_ns <= one.begin_ns
        published = of_tile(trace.events, tile, PUBLISH)
        assert len(published) == (3 * each if transfer == "direct" else 3)
        for window, decided in enumerate(of_tile(trace.events, tile, KEPT, STEP_IN_PLACE)):
            assert decided.end_ns <= published[window * len(published) // 3].begin_ns
    ahead = named(trace.events, STEP_AHEAD)
    assert len(ahead) == len(named(trace.events, KEPT)) == (3 * len(training.tiles) if memory else 0)
    assert all(event.track.startswith("longshore-host") for event in ahead), "on the worker"


def test_measuring_ahead_of_the_norm_is_seen(traced: Trace) -> None:
    measured = named(traced.events, MEASURE)
    assert {event.tile for event in measured} and all(event.track.startswith("longshore-host") for event in measured)


def test_a_kept_tile_was_stepped_ahead_of_the_verdict(traced: Trace) -> None:
    for events in windows_of(traced):
        (step,) = named(events, STEP)
        (backward,) = named(events, BACKWARD)
        (norm,) = named(events, NORM)
        assert backward.begin_ns == min(event.begin_ns for event in named(events, ARRIVE))
        assert backward.end_ns == step.begin_ns
        assert norm.end_ns <= step.begin_ns
        assert named(events, KEPT)
        for kept in named(events, KEPT):
            assert kept.tile is not None
            (ahead,) = of_tile(events, kept.tile, STEP_AHEAD)
            assert backward.begin_ns < ahead.end_ns <= kept.begin_ns
            assert step.begin_ns <= kept.begin_ns <= step.end_ns


def test_a_verdict_that_was_another_is_redone_in_place() -> None:
    training = Training()
    training.train(2)
    with longshore.trace(training.optimizer) as trace:
        training.train(1, clip=1e-3)
    (events,) = windows_of(trace)
    record = training.optimizer.speculation
    assert record is not None and record.redone > 0
    assert len(named(events, REDONE)) == record.redone
    for redone in named(events, REDONE):
        assert redone.tile is not None
        (again,) = of_tile(events, redone.tile, STEP_IN_PLACE)
        assert redone.end_ns <= again.begin_ns
    assert trace.summary().hit_rate == 0


def test_one_backward_more_drops_what_was_stepped_ahead() -> None:
    training = Training("direct")
    training.train(2)
    with longshore.trace(training.optimizer) as trace:
        training.train(1, backwards=2)
    record = training.optimizer.speculation
    assert record is not None
    assert len(named(trace.events, DROPPED)) == record.dropped > 0
    assert {event.tile for event in named(trace.events, STEP_IN_PLACE)} == training.tiles


def test_a_discarded_window_is_no_part_of_the_next_one() -> None:
    training = Training()
    with longshore.trace(training.optimizer) as trace:
        training.backward()
        training.optimizer.zero_grad()
        training.train(1)
    discarded = named(trace.events, DISCARD)[0]
    (backward,) = named(trace.events, BACKWARD)
    assert min(event.begin_ns for event in named(trace.events, ARRIVE)) < discarded.begin_ns < backward.begin_ns


@pytest.mark.parametrize("release", [True, False])
def test_zero_grad_after_a_step_discards_nothing(release: bool) -> None:
    training = Training(release=release)
    with longshore.trace(training.optimizer) as trace:
        training.optimizer.zero_grad()
        training.train(2)
    assert len(named(trace.events, STEP)) == 2 and named(trace.events, DISCARD) == []


def test_gradients_that_stay_until_the_step_arrive_inside_it() -> None:
    training = Training(release=False)
    with longshore.trace(training.optimizer) as trace:
        training.train(2)
    assert named(trace.events, BACKWARD) == []
    for events in windows_of(trace):
        (step,) = named(events, STEP)
        assert {event.tile for event in named(events, STEP_IN_PLACE)} == training.tiles
        assert all(step.begin_ns <= event.begin_ns for event in named(events, ARRIVE))


def test_a_pass_that_fails_has_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training("direct")
    training.train(2)

    def fail(*_: Any) -> None:
        raise RuntimeError("no pass")

    with longshore.trace(training.optimizer) as trace:
        monkeypatch.setattr(training.optimizer._core.members.store.tiles.kernels, "step_tile", fail)
        training.backward()
        with pytest.raises(RuntimeError, match="no pass"):
            training.optimizer.step()
    assert named(trace.events, STEP_AHEAD) and len(named(trace.events, STEP_IN_PLACE)) == 1
    assert named(trace.events, STEP) == [], "it did not return"


# -- the block ----------------------------------------------------------------


def test_nothing_is_recorded_outside_the_block() -> None:
    training = Training()
    with longshore.trace(training.optimizer) as trace:
        training.train(1)
        assert trace.events == ()
    recorded = trace.events
    assert recorded and not any(thread.name.startswith("longshore-trace") for thread in threading.enumerate())
    training.train(2)
    assert trace.events is recorded
    assert all(tile.recorder is NO_RECORDER for tile in training.optimizer._core.members.store.tiles)
    assert not training.optimizer._optimizer_step_pre_hooks and not training.optimizer._optimizer_step_post_hooks


def test_what_ends_after_the_block_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training("direct")
    training.train(2)
    kernels, go_on = training.optimizer._core.members.store.tiles.kernels, threading.Event()
    step_tile, begun = kernels.step_tile, threading.Event()

    def slowly(*arguments: Any) -> None:
        begun.set()
        assert go_on.wait(60)
        step_tile(*arguments)

    monkeypatch.setattr(kernels, "step_tile", slowly)
    with longshore.trace(training.optimizer) as trace:
        training.backward()
        assert begun.wait(60)
    recorded = trace.events
    go_on.set()
    training.optimizer.step()
    assert trace.events is recorded and named(recorded, ARRIVE)
    assert named(recorded, STEP_AHEAD) == []


def test_the_block_ends_where_it_raises() -> None:
    training = Training()
    with contextlib.suppress(ZeroDivisionError), longshore.trace(training.optimizer) as trace:
        training.train(1)
        raise ZeroDivisionError
    assert named(trace.events, STEP)
    assert all(tile.recorder is NO_RECORDER for tile in training.optimizer._core.members.store.tiles)


def test_parameters_that_are_added_in_the_block_are_in_it() -> None:
    training = Training()
    before = set(training.tiles)
    extra = nn.Parameter(torch.randn(40))
    with longshore.trace(training.optimizer) as trace:
        training.optimizer.add_param_group({"params": [extra]})
        extra.square().sum().backward()
        training.optimizer.step()
    assert {event.tile for event in named(trace.events, ARRIVE)}.isdisjoint(before)
    assert named(trace.events, PUBLISH)


@pytest.mark.covering(1)
@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("clip", [None, 1e-3])
def test_the_bits_are_the_same(transfer: str, clip: float | None) -> None:
    ours, other = Training(transfer), Training(transfer)
    assert all(torch.equal(a, b) for a, b in zip(ours.model.parameters(), other.model.parameters(), strict=True))
    start = copy.deepcopy(ours.model.state_dict())
    torch.manual_seed(11)
    ours.train(5, 2, clip)
    torch.manual_seed(11)
    with longshore.trace(other.optimizer) as trace:
        other.train(5, 2, clip)
    assert len(named(trace.events, STEP)) == 5
    for name, value in ours.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]) and not torch.equal(value, start[name])


def test_what_cannot_be_traced_is_named() -> None:
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(TypeError, match=r"not torch\.optim\.sgd\.SGD"), longshore.trace(plain):
        pass
    training = Training()
    with longshore.trace(training.optimizer):
        with pytest.raises(LongshoreError, match="being traced already"), longshore.trace(training.optimizer):
            pass
        assert all(tile.recorder is not NO_RECORDER for tile in training.optimizer._core.members.store.tiles)


def test_it_is_read_after_the_block(tmp_path: Path) -> None:
    training = Training()
    with longshore.trace(training.optimizer) as trace:
        training.train(1)
        for read in (
            trace.summary,
            lambda: trace.save_chrome(tmp_path / "trace.json"),
            lambda: trace.save_html(tmp_path / "trace.html"),
        ):
            with pytest.raises(LongshoreError, match="still being recorded; read and save it after the block"):
                read()
    assert trace.summary().steps == 1 and not list(tmp_path.iterdir())


def test_an_engine() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 9))
    config = {
        "train_micro_batch_size_per_gpu": 5,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    }
    engine = longshore.initialize(model=model, model_parameters=model.parameters(), config=config).engine
    with longshore.trace(engine) as trace:
        for _ in range(2):
            engine.backward((engine(torch.randn(5, 16)) ** 2).mean())
            engine.step()
    engine.destroy()
    assert trace.rank == 0
    assert [event.name for event in trace.events if event.name in (BACKWARD, NORM, STEP)] == [BACKWARD, NORM, STEP] * 2


# -- what is made of it -------------------------------------------------------


def test_the_chrome_file(traced: Trace, tmp_path: Path) -> None:
    traced.save_chrome(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(traced.events)
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {event["tid"] for event in complete} == set(tracks)
    assert {STEP_TRACK, "MainThread", f"stream: {COPY_TO_HOST}", f"stream: {PUBLISH}"} < set(tracks.values())
    for track in tracks:
        own = [event for event in complete if event["tid"] == track]
        assert all(event["ts"] >= 0 and event["dur"] >= 0 and event["pid"] == traced.rank for event in own)
        assert [event["ts"] for event in own] == sorted(event["ts"] for event in own)
    exposed = [event for event in complete if event["name"] in (STEP, NORM)]
    assert len(exposed) == 6
    assert sum(event["dur"] for event in exposed) / 3e6 == pytest.approx(traced.summary().exposed_s)


def test_what_one_track_does_is_one_after_the_other(traced: Trace) -> None:
    tracks = {event.track for event in traced.events}
    for track in tracks:
        own = [event for event in traced.events if event.track == track]
        for before, after in itertools.pairwise(own):
            assert before.end_ns <= after.begin_ns


def test_the_page_stands_alone(traced: Trace, tmp_path: Path) -> None:
    traced.save_html(tmp_path / "trace.html")
    page = (tmp_path / "trace.html").read_text()
    assert not re.search(r"https?:|//\w|src=|href=|@import|url\(", page)
    assert page.count('class="exposed"') == len(named(traced.events, STEP)) + len(named(traced.events, NORM)) == 6
    shapes = page.count("<title>") - 1  # the page's own
    assert shapes == len(traced.events)
    shown = re.search(r'class="names">(.*?)</div><div class="scroll"', page)
    assert shown is not None
    tracks = {event.track for event in traced.events}
    assert shown[1].count("<div>") == len(tracks)
    assert "<div>main thread</div>" in page and "<div>stream: copies to the host</div>" in page
    assert "MainThread" not in page and "longshore-host" not in page
    # Shapes without an area at the first zoom are seen too.
    shapes_with_colour = re.findall(r"<(?:rect x|line)[^>]*>", page)
    assert len(shapes_with_colour) == len(traced.events)
    assert all("non-scaling-stroke" in shape for shape in shapes_with_colour)
    explained = re.findall(r"</i><b>(.+?)</b>: \w", page)
    assert sorted(explained) == sorted({event.name for event in traced.events} | {"exposed"})
    assert str(traced.summary()) in page


def test_an_empty_block(tmp_path: Path) -> None:
    with longshore.trace(Training().optimizer) as trace:
        pass
    trace.save_chrome(tmp_path / "trace.json")
    trace.save_html(tmp_path / "trace.html")
    assert trace.summary()[:4] == (0, None, None, None)
    assert "-" in str(trace.summary())
    page = (tmp_path / "trace.html").read_text()
    assert "Nothing was recorded" in page and "<svg" not in page and str(trace.summary()) in page


def test_begins_are_not_before_the_block() -> None:
    training = Training()
    training.train(1)
    before = time.perf_counter_ns()
    with longshore.trace(training.optimizer) as trace:
        training.train(2)
    after = time.perf_counter_ns()
    assert all(before <= event.begin_ns <= event.end_ns <= after for event in trace.events)

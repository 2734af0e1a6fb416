"""The summary adds up what the events say."""

from __future__ import annotations

import pytest

from longshore.tiles.events import (
    ARRIVE,
    COPY_TO_HOST,
    DISCARD,
    DROPPED,
    KEPT,
    NORM,
    PUBLISH,
    STEP_AHEAD,
    STEP_IN_PLACE,
)
from longshore.tracing.events import BACKWARD, STEP, STEP_TRACK, Event, exposed_spans, in_order
from longshore.tracing.record import summarize

MS = 1_000_000


def event(name: str, begin_ms: int, end_ms: int, tile: int | None = None, num_bytes: int = 0) -> Event:
    track = STEP_TRACK if name == STEP else "thread"
    return Event(name, tile, track, begin_ms * MS, end_ms * MS, num_bytes)


EVENTS = [
    event(COPY_TO_HOST, 101, 103, 0, 4_000),
    event(STEP_AHEAD, 103, 105, 0, 6_000_000),
    event(STEP_AHEAD, 105, 106, 1, 3_000_000),
    event(NORM, 107, 108),
    event(KEPT, 110, 110, 0),
    event(DROPPED, 110, 110, 1),
    event(STEP_IN_PLACE, 111, 114, 1, 3_000_000),
    event(PUBLISH, 114, 116, 1, 8_000),
    event(STEP, 109, 120),
    event(STEP_AHEAD, 123, 124, 2, 1_000_000),
    event(KEPT, 131, 131, 2),
    event(STEP, 130, 139),
    event(NORM, 150, 155),  # of a window that was not stepped
]


def test_all_of_it() -> None:
    found = summarize(in_order(EVENTS), 100 * MS, spares=5)
    assert found.steps == 2
    assert found.step_s == pytest.approx(39e-3 / 2)
    assert found.exposed_s == pytest.approx(21e-3 / 2)
    assert found.norm_s == pytest.approx(1e-3 / 2)
    assert found.host_bytes_per_second == pytest.approx(13_000_000 / 7e-3)
    assert found.to_host_bytes_per_second == pytest.approx(4_000 / 2e-3)
    assert found.to_device_bytes_per_second == pytest.approx(8_000 / 2e-3)
    assert found.hit_rate == pytest.approx(2 / 3)
    assert (found.spares_used, found.spares) == (2, 5)
    lines = str(found).splitlines()
    assert len(lines) == 9
    assert lines[1].split()[-2:] == ["19.50", "ms"] and lines[-1].endswith("2 of 5")
    assert any(line.startswith("host passes") and line.endswith("1.86 GB/s") for line in lines)


def test_a_norm_inside_a_step_is_exposed_once() -> None:
    events = [event(NORM, 1, 2), event(STEP, 3, 9), event(NORM, 4, 5), event(NORM, 9, 10), event(STEP, 10, 12)]
    expected = [(1, 2), (3, 9), (9, 10), (10, 12)]
    assert exposed_spans(in_order(events)) == [(begin * MS, end * MS) for begin, end in expected]


def test_a_backward_goes_from_its_windows_first_arrival_to_the_step() -> None:
    events = [
        event(ARRIVE, 1, 1, 0),
        event(DISCARD, 2, 2),
        event(ARRIVE, 3, 3, 1),
        event(ARRIVE, 4, 4, 0),
        event(STEP, 6, 9),
        event(STEP, 12, 20),
        event(ARRIVE, 13, 13, 0),
        event(DISCARD, 21, 21),
    ]
    backwards = [found for found in in_order(events) if found.name == BACKWARD]
    assert backwards == [Event(BACKWARD, None, STEP_TRACK, 3 * MS, 6 * MS)]

"""A trace in the JSON that Chrome and Perfetto read ("Trace Event Format")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longshore.tracing.events import STEP_LANE, Event


def lanes_of(events: Sequence[Event]) -> list[str]:
    """Names of lanes: that of the steps first, then threads, then copies."""
    return sorted({event.lane for event in events}, key=lambda lane: (lane != STEP_LANE, ": " in lane, lane))


def chrome_events(events: Sequence[Event], rank: int, begin_ns: int) -> list[dict[str, Any]]:
    """Complete events, by their beginnings, in microseconds since ``begin_ns``; and the names of rank and lanes."""
    thread_of = {lane: thread for thread, lane in enumerate(lanes_of(events))}
    names = [{"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}]
    for lane, thread in thread_of.items():
        names.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": lane}})
        names.append(
            {"name": "thread_sort_index", "ph": "M", "pid": rank, "tid": thread, "args": {"sort_index": thread}}
        )
    return names + [
        {
            "name": event.name,
            "ph": "X",
            "pid": rank,
            "tid": thread_of[event.lane],
            "ts": (event.begin_ns - begin_ns) / 1e3,
            "dur": (event.end_ns - event.begin_ns) / 1e3,
            "args": {
                key: value
                for key, value in (("tile", event.tile), ("bytes", event.num_bytes or None))
                if value is not None
            },
        }
        for event in events
    ]

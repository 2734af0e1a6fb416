"""The events of a trace, and the recorder that writes them down."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from longshore.host import Recorder
from longshore.host.events import ARRIVE, COPY_TO_HOST, DISCARD, NORM, PUBLISH
from longshore.kernels import TileSegment
from longshore.transfer import CopyHandle, FinishedCopy

BACKWARD = "backward"
"""From the first arrival of a window to the call of ``step()``."""
STEP = "step"
"""``step()`` of the optimizer, from its call to its return."""
STEP_LANE = "backward, step()"
"""The lane of these two."""


class Event(NamedTuple):
    """Something that happened, in nanoseconds of ``time.perf_counter_ns``."""

    name: str
    tile: int | None
    """None: it is not one tile's."""
    lane: str
    """A lane of copies, or the thread that did it."""
    begin_ns: int
    end_ns: int
    """The same as ``begin_ns`` for what takes no time."""
    num_bytes: int = 0
    """Of pages, read and written, or copied; 0 where nobody counted."""


class EventRecorder(Recorder):
    """Appends to a list, from any thread. A pass is told when it is over, so each one that is there has ended."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._copies = {name: _CopyWatch(name, self._append) for name in (COPY_TO_HOST, PUBLISH)}

    def close(self) -> list[Event]:
        """All events; waits for copies that were asked for. What is told afterwards is forgotten."""
        for watch in self._copies.values():
            watch.close()
        events, self._events = self._events, []
        return events

    def begin(self, name: str, tile: int | None) -> int:
        return time.perf_counter_ns()

    def mark(self, name: str, tile: int | None) -> None:
        now = time.perf_counter_ns()
        self._append(Event(name, tile, _this_thread(), now, now))

    def span(self, name: str, tile: int | None, begin_ns: int) -> None:
        self._append(Event(name, tile, _this_thread(), begin_ns, time.perf_counter_ns()))

    def step(self, begin_ns: int) -> None:
        self._append(Event(STEP, None, STEP_LANE, begin_ns, time.perf_counter_ns()))

    def passed(self, name: str, tile: int, page: Tensor, rows: Sequence[TileSegment], begin_ns: int) -> None:
        end_ns = time.perf_counter_ns()
        # Kernels of another device have only been enqueued by now: their time is not known.
        numel = sum(row.gradient.numel() for row in rows) if page.device.type == "cpu" else 0
        num_bytes = 2 * page.shape[0] * page.element_size() * numel
        self._append(Event(name, tile, _this_thread(), begin_ns, end_ns, num_bytes))

    def copying(self, name: str, tile: int, handle: CopyHandle, begin_ns: int) -> None:
        if not isinstance(handle, FinishedCopy):
            self._copies[name].put(tile, handle, begin_ns)
        elif name == PUBLISH:  # by the caller, or by the pass itself; a gradient was only taken over
            self.span(name, tile, begin_ns)

    def _append(self, event: Event) -> None:
        self._events.append(event)


class _Asked(NamedTuple):
    tile: int
    handle: CopyHandle
    begin_ns: int


class _CopyWatch:
    """Waits for the copies of one lane on a thread of its own, since nobody else may wait for them in time.

    A copy begins where it was asked for or where the one before it ended, and ends where this thread
    sees it, which is late by what the machine takes to wake it up.
    """

    def __init__(self, name: str, append: Callable[[Event], None]) -> None:
        self._name = name
        self._append = append
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name=f"longshore-trace-{name}", daemon=True)
        self._thread.start()

    def put(self, tile: int, handle: CopyHandle, begin_ns: int) -> None:
        self._asked.put(_Asked(tile, handle, begin_ns))

    def close(self) -> None:
        self._asked.put(None)
        self._thread.join()

    def _watch(self) -> None:
        free_ns = 0  # a lane copies one after the other
        while (asked := self._asked.get()) is not None:
            target = asked.handle.target
            try:
                asked.handle.wait()
            except Exception:  # whoever needs the copy raises it
                continue
            end_ns = time.perf_counter_ns()
            begin_ns = max(asked.begin_ns, free_ns)
            num_bytes = target.numel() * target.element_size()
            self._append(Event(self._name, asked.tile, f"lane: {self._name}", begin_ns, end_ns, num_bytes))
            free_ns = end_ns
            del asked, target  # the next one may be long in coming


def _this_thread() -> str:
    name = threading.current_thread().name
    return "autograd" if name.startswith("Dummy-") else name  # a thread that Python did not start


def in_order(events: Sequence[Event]) -> list[Event]:
    """The events by their beginnings, with a BACKWARD for each step that gradients arrived before.

    A loop calls zero_grad() after each step as well, which discards nothing and is left out.
    """
    complete: list[Event] = []
    first_ns: int | None = None
    stepped_by_ns = 0
    for event in sorted(events, key=_beginning):
        if event.name == DISCARD and first_ns is None:
            continue
        complete.append(event)
        # What arrives inside step() is of the window that ends there.
        if event.name == ARRIVE and first_ns is None and event.begin_ns >= stepped_by_ns:
            first_ns = event.begin_ns
        elif event.name == DISCARD:
            first_ns = None
        elif event.name == STEP:
            if first_ns is not None:
                complete.append(Event(BACKWARD, None, STEP_LANE, first_ns, event.begin_ns))
            first_ns, stepped_by_ns = None, event.end_ns
    return sorted(complete, key=_beginning)


def exposed_spans(events: Sequence[Event]) -> list[tuple[int, int]]:
    """Beginnings and ends, in order and apart, of what training waited for: each ``step()``, and the norms before.

    ``events`` are by their beginnings. A norm of a window that was not stepped is left out.
    """
    stepped_by_ns = max((event.end_ns for event in events if event.name == STEP), default=0)
    spans: list[tuple[int, int]] = []
    for event in events:
        if event.name not in (NORM, STEP) or event.begin_ns >= stepped_by_ns:
            continue
        if spans and event.begin_ns < spans[-1][1]:  # measured inside step()
            spans[-1] = (spans[-1][0], max(spans[-1][1], event.end_ns))
        else:
            spans.append((event.begin_ns, event.end_ns))
    return spans


def _beginning(event: Event) -> tuple[int, int]:
    return event.begin_ns, -event.end_ns

"""The events of a trace, and the recorder that collects them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from longshore.seam import (
    ARRIVE,
    COPY_TO_HOST,
    DISCARD,
    NORM,
    PUBLISH,
    TRANSFORM,
    WAIT,
    Buffer,
    Copy,
    DeviceClock,
    FinishedCopy,
    Mark,
    Recorder,
    TileSegment,
    element_bytes,
)

BACKWARD = "backward"
"""Event from the first gradient of an accumulation window to the call of ``step()``."""
STEP = "step"
"""Event of the optimizer's ``step()``, from its call to its return."""
DEVICE_TRACK = "device"
"""The track of WAIT, and of a device's TRANSFORM."""
_SHORTEST_WAIT_NS = 1_000
STEP_TRACK = "backward, step()"
"""The track of BACKWARD and STEP."""


class Event(NamedTuple):
    """One event; times are nanoseconds of ``time.perf_counter_ns``."""

    name: str
    tile: int | None
    """The tile's index; None: the event does not belong to one tile."""
    track: str
    """The name of the thread that did it, or of the copy stream."""
    begin_ns: int
    end_ns: int
    """Equal to ``begin_ns`` for an event without duration."""
    num_bytes: int = 0
    """Bytes of optimizer state read and written, or bytes copied; 0 if they are not counted."""
    device_end_ns: int = 0
    """When the device went on after a STEP, whose last copies it waits for; 0 for other events, and without a device.
    """


class EventRecorder(Recorder):
    """Collects events from any thread.

    A pass is reported when it is over, so every pass in the list has ended. Work that a device does later than the host
    asks for it has the device's times: its copies, the end of its backward (where a norm or a step begins to keep it
    waiting), and where it goes on after a step.

    Args:
        clock: the clock of the device; None: all is done by this process's threads.
    """

    times_copies = True

    def __init__(self, clock: DeviceClock | None = None) -> None:
        self._clock = clock
        self._events: list[Event] = []
        self._late: list[tuple[Event, Mark, Mark | None]] = []
        """Events whose beginning is an event of the device, and perhaps their end."""
        self._began: dict[str, Mark] = {}
        """When the device was asked for what goes on: a norm, a transformation."""
        self._step_called: tuple[int, Mark | None] = (0, None)
        self._copies: dict[str, queue.SimpleQueue[tuple[int | None, Copy, int] | None]] = {
            name: queue.SimpleQueue() for name in (COPY_TO_HOST, PUBLISH)
        }
        self._watchers = [
            threading.Thread(target=self._watch, args=(name,), name=f"longshore-trace-{name}", daemon=True)
            for name in self._copies
        ]
        for watcher in self._watchers:
            watcher.start()

    def close(self) -> list[Event]:
        """Wait for copies that are under way, and return all events. Later events are dropped."""
        for copies in self._copies.values():
            copies.put(None)
        for watcher in self._watchers:
            watcher.join()
        events, self._events = self._events, []
        late, self._late = self._late, []
        dated = [self._dated(*each) for each in late]
        # Whether a device has to wait is known only afterwards.
        waits = [each for each in dated if each.name != WAIT or each.end_ns - each.begin_ns >= _SHORTEST_WAIT_NS]
        return events + waits

    def _dated(self, event: Event, began: Mark, ended: Mark | None) -> Event:
        clock = self._clock
        assert clock is not None
        begin_ns = max(event.begin_ns, clock.ns_of(began))
        if ended is None:
            return event._replace(begin_ns=min(begin_ns, event.end_ns))
        if event.name == STEP:
            end_ns = max(event.end_ns, begin_ns)
            return event._replace(begin_ns=begin_ns, end_ns=end_ns, device_end_ns=clock.ns_of(ended))
        return event._replace(begin_ns=begin_ns, end_ns=clock.ns_of(ended))

    def begin(self, name: str, tile: int | None) -> int:
        if name in (NORM, TRANSFORM) and self._clock is not None:
            self._began[name] = self._clock.mark()
        return time.perf_counter_ns()

    def mark(self, name: str, tile: int | None) -> None:
        now = time.perf_counter_ns()
        self._events.append(Event(name, tile, _this_thread(), now, now))

    def span(self, name: str, tile: int | None, begin_ns: int) -> None:
        event = Event(name, tile, _this_thread(), begin_ns, time.perf_counter_ns())
        began, ended = self._began.pop(name, None), None
        if name == TRANSFORM and began is not None and self._clock is not None:
            event, ended = event._replace(track=DEVICE_TRACK), self._clock.mark()
        self._add(event, began, ended)

    def calling_step(self) -> None:
        """Note that ``step()`` is called."""
        self._step_called = time.perf_counter_ns(), None if self._clock is None else self._clock.mark()

    def step(self) -> None:
        """Report a ``step()`` that returns now."""
        begin_ns, began = self._step_called
        event = Event(STEP, None, STEP_TRACK, begin_ns, time.perf_counter_ns())
        self._add(event, began, None if self._clock is None else self._clock.mark())

    def _add(self, event: Event, began: Mark | None, ended: Mark | None) -> None:
        if began is None:
            self._events.append(event)
        else:
            self._late.append((event, began, ended))

    def passed(self, name: str, tile: int, buffer: Buffer, rows: Sequence[TileSegment], begin_ns: int) -> None:
        end_ns = time.perf_counter_ns()
        # Kernels of another device have only been enqueued, so their duration is not known.
        numel = sum(row.gradient.numel() for row in rows) if buffer.device.type == "cpu" else 0
        num_bytes = round(2 * element_bytes(buffer) * numel)
        self._events.append(Event(name, tile, _this_thread(), begin_ns, end_ns, num_bytes))

    def copying(self, name: str, tile: int | None, handle: Copy, begin_ns: int) -> None:
        if handle.timed is not None:
            event = Event(name, tile, f"stream: {name}", begin_ns, begin_ns, handle.num_bytes)
            self._add(event, *handle.timed)
        elif not isinstance(handle, FinishedCopy):
            self._copies[name].put((tile, handle, begin_ns))
        elif name == PUBLISH:  # this thread copied; a gradient in host memory is not copied at all
            self.span(name, tile, begin_ns)

    def waited(self, begun: Mark, ended: Mark) -> None:
        now = time.perf_counter_ns()
        self._add(Event(WAIT, None, DEVICE_TRACK, now, now), begun, ended)

    def _watch(self, name: str) -> None:
        """Wait for each copy of one stream, on a thread of its own, since no other thread waits for each copy's end.

        A copy begins when it was issued or when the copy before it ended, whichever is later. It ends when this thread
        sees it end, which is late by the time that the system takes to wake the thread.
        """
        free_ns = 0  # a stream runs its copies one after the other
        while (copy := self._copies[name].get()) is not None:
            tile, handle, issued_ns = copy
            try:
                handle.wait()
            except Exception:  # the code that needs the copy raises it again
                continue
            begin_ns, free_ns = max(issued_ns, free_ns), time.perf_counter_ns()
            self._events.append(Event(name, tile, f"stream: {name}", begin_ns, free_ns, handle.num_bytes))
            del copy, handle  # so that the tensor is not kept alive until the next copy


def _this_thread() -> str:
    name = threading.current_thread().name
    return "autograd" if name.startswith("Dummy-") else name  # the thread was not started by Python


def in_order(events: Sequence[Event]) -> list[Event]:
    """Sort events by their beginnings, and add a BACKWARD for each step before which gradients arrived.

    A ``zero_grad()`` after a step discards nothing; its event is left out.
    """
    complete: list[Event] = []
    first_ns: int | None = None
    stepped_by_ns = 0
    for event in sorted(events, key=_beginning):
        if event.name == DISCARD and first_ns is None:
            continue
        complete.append(event)
        # Gradients that arrive inside step() belong to the window that ends there.
        if event.name == ARRIVE and first_ns is None and event.begin_ns >= stepped_by_ns:
            first_ns = event.begin_ns
        elif event.name == DISCARD:
            first_ns = None
        elif event.name == STEP:
            if first_ns is not None:
                complete.append(Event(BACKWARD, None, STEP_TRACK, first_ns, event.begin_ns))
            first_ns, stepped_by_ns = None, event.end_ns
    return sorted(complete, key=_beginning)


def exposed_spans(events: Sequence[Event]) -> list[tuple[int, int]]:
    """Return the beginnings and ends of the times in which training waited: each ``step()``, and each norm before it.

    On a device these begin when its backward has ended, and end when its next forward may begin.

    The spans are sorted and do not overlap. Norms of windows that were not stepped are left out. ``events`` are sorted
    by their beginnings.
    """
    stepped_by_ns = max((event.end_ns for event in events if event.name == STEP), default=0)
    spans: list[tuple[int, int]] = []
    for event in events:
        if event.name not in (NORM, STEP) or event.begin_ns >= stepped_by_ns:
            continue
        end_ns = max(event.end_ns, event.device_end_ns)
        if spans and event.begin_ns < spans[-1][1]:  # measured inside step()
            spans[-1] = (spans[-1][0], max(spans[-1][1], end_ns))
        else:
            spans.append((event.begin_ns, end_ns))
    return spans


def _beginning(event: Event) -> tuple[int, int]:
    return event.begin_ns, -event.end_ns

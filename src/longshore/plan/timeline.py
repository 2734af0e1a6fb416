"""Lanes that do one thing at a time, and events that wait for others: what a simulation is made of."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

from longshore.host.events import Lane, Row, Which


class Span(NamedTuple):
    """Something that a lane did, in seconds from the beginning of the step."""

    name: str
    lane: Lane
    begin_s: float
    end_s: float


class Timeline:
    """Runs events in the order in which they are asked for.

    A lane is a FIFO: an event begins when the one before it in its lane has
    ended, and so has all that the table makes it wait for.

    Args:
        table: which lane each kind of event takes, and what it waits for.
        same_as: lanes that are the same thing as another one, on this machine.
    """

    def __init__(self, table: Mapping[str, Row], same_as: Mapping[Lane, Lane]) -> None:
        self._table = table
        self._same_as = same_as
        self._free: dict[Lane, float] = dict.fromkeys(Lane, 0.0)
        self._ends: dict[tuple[str, Hashable], float] = {}
        self._last: dict[str, float] = {}
        self.spans: list[Span] = []
        self.busy: dict[Lane, float] = dict.fromkeys(Lane, 0.0)

    def lane_of(self, name: str) -> Lane:
        lane = self._table[name].lane
        return self._same_as.get(lane, lane)

    def ready(self, name: str, keys: Iterable[Hashable]) -> float:
        """When all that an event waits for has ended; ``keys`` name the events that are of the same tile."""
        ready, named = 0.0, tuple(keys)
        for before, which in self._table[name].after:
            if which is Which.ALL:
                ready = max(ready, self._last.get(before, 0.0))
            else:
                ready = max([ready, *(self._ends.get((before, key), 0.0) for key in named)])
        return ready

    def begins(self, name: str, keys: Iterable[Hashable]) -> float:
        """When an event would begin, if it were asked for now."""
        return max(self._free[self.lane_of(name)], self.ready(name, keys))

    def run(
        self, name: str, key: Hashable, seconds: float, keys: Iterable[Hashable] = (), not_before: float = 0.0
    ) -> float:
        """Ask for an event; returns when it ends.

        Args:
            name: its row of the table.
            key: its own.
            seconds: how long it takes.
            keys: further ones of the same tile, as those of the buckets that bring its gradients.
            not_before: what it waits for beside the table.
        """
        lane = self.lane_of(name)
        begin = max(self._free[lane], self.ready(name, (key, *keys)), not_before)
        end = self._free[lane] = begin + seconds
        self._ends[name, key] = max(end, self._ends.get((name, key), 0.0))
        self._last[name] = max(end, self._last.get(name, 0.0))
        if seconds > 0:
            self.spans.append(Span(name, lane, begin, end))
            self.busy[lane] += seconds
        return end

    def last(self, name: str) -> float:
        """When the last event of this kind ended."""
        return self._last.get(name, 0.0)

    @property
    def end(self) -> float:
        return max(self._last.values(), default=0.0)

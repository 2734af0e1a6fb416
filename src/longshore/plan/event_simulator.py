"""Simulate events on tracks, by a table of which event waits for which."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

from longshore.seam import Row, Track, Which


class Span(NamedTuple):
    """An event on a track, in seconds from the beginning of the step."""

    name: str
    track: Track
    begin_s: float
    end_s: float


class EventSimulator:
    """Runs events in the order in which they are asked for.

    A track is a FIFO: an event begins when the previous event on its track has ended, and all events for which the
    table makes it wait. ``same_as`` maps tracks to the track with which they share a resource on this machine.
    """

    def __init__(self, table: Mapping[str, Row], same_as: Mapping[Track, Track]) -> None:
        self._table = table
        self._same_as = same_as
        self._free: dict[Track, float] = dict.fromkeys(Track, 0.0)
        self._ends: dict[tuple[str, Hashable], float] = {}
        self._last: dict[str, float] = {}
        self.spans: list[Span] = []
        self.busy: dict[Track, float] = dict.fromkeys(Track, 0.0)

    def _track_of(self, name: str) -> Track:
        track = self._table[name].track
        return self._same_as.get(track, track)

    def ready(self, name: str, keys: Iterable[Hashable]) -> float:
        """Return when all events for which an event waits have ended; ``keys`` name the events of the same tile."""
        ends, keys = [0.0], tuple(keys)
        for before, which in self._table[name].after:
            if which is Which.ALL:
                ends.append(self.last(before))
            else:
                ends += [self._ends.get((before, key), 0.0) for key in keys]
        return max(ends)

    def begins(self, name: str, keys: Iterable[Hashable]) -> float:
        """Return when an event would begin if it were asked for now."""
        return max(self._free[self._track_of(name)], self.ready(name, keys))

    def run(
        self, name: str, key: Hashable, seconds: float, keys: Iterable[Hashable] = (), not_before: float = 0.0
    ) -> float:
        """Run an event of the kind ``name``, and return when it ends.

        ``keys`` are further keys of the same tile, such as those of the buckets that bring its gradients;
        ``not_before`` is the earliest time at which it may begin.
        """
        track = self._track_of(name)
        begin = max(self.begins(name, (key, *keys)), not_before)
        end = self._free[track] = begin + seconds
        self._ends[name, key] = max(end, self._ends.get((name, key), 0.0))
        self._last[name] = max(end, self.last(name))
        if seconds > 0:
            self.spans.append(Span(name, track, begin, end))
            self.busy[track] += seconds
        return end

    def last(self, name: str) -> float:
        """Return when the last event of this kind ended."""
        return self._last.get(name, 0.0)

    @property
    def end(self) -> float:
        return max(self._last.values(), default=0.0)

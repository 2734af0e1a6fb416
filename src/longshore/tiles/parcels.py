"""Parcels: small gradients of one tile that are copied to the host together, since each copy has a cost of its own."""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

from torch import Tensor

from longshore.accelerator import Mark
from longshore.layout.tiles import SMALL_NUMEL, SegmentLayout
from longshore.tiles.steps import without_frames
from longshore.transfer import Copy, wait_for_all


class Entry(NamedTuple):
    """A gradient that has arrived: its segment, which is at this place of its tile, and the position from which on the
    gradient is valid (see ``CopyStreams.mark``)."""

    place: int
    segment: SegmentLayout
    gradient: Tensor
    ready: Sequence[Mark]

    @property
    def travels_with_others(self) -> bool:
        """Whether it may wait for others. A part of something large would keep all of that in memory."""
        most_bytes = SMALL_NUMEL * self.gradient.element_size()
        return self.segment.small and self.gradient.untyped_storage().nbytes() < most_bytes


class Waiting:
    """The gradients that wait in parcels, of which the oldest go when they have more bytes than ``most_bytes``."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        # The worker may begin a parcel while another thread adds to one.
        self._lock = threading.Lock()
        self._bytes = 0
        self._parcels: deque[Parcel] = deque()

    def opened(self, parcel: Parcel) -> None:
        self._parcels.append(parcel)

    def change(self, num_bytes: int) -> None:
        """Count bytes that begin to wait, or fewer that do."""
        with self._lock:
            self._bytes += num_bytes

    def limit(self) -> None:
        """Begin the oldest parcels, until few enough bytes wait. Parcels that have begun are forgotten."""
        while self._parcels and (self._parcels[0].begun or self._bytes >= self._most_bytes):
            parcel = self._parcels.popleft()
            if not parcel.begun:
                parcel.begin()


class Parcel(Copy):
    """Handle of the copies of small gradients, which begin when the parcel is full or is waited for.

    Args:
        size: how many gradients are expected.
        waiting: counts the bytes that wait.
        start: starts the copies of entries that are neighbors in the tile's buffer.
    """

    def __init__(self, size: int, waiting: Waiting, start: Callable[[Sequence[Entry]], list[Copy]]) -> None:
        self._size = size
        self._waiting = waiting
        self._start = start
        # The thread that brings gradients adds, and the worker waits.
        self._lock = threading.Lock()
        self._entries: list[Entry] = []
        self._copies: list[Copy] | None = None
        self._failure: Exception | None = None
        waiting.opened(self)

    @property
    def begun(self) -> bool:
        return self._copies is not None

    def add(self, entry: Entry) -> bool:
        """Add a gradient, unless the copies have begun; return whether it was added."""
        with self._lock:
            if self._copies is not None:
                return False
            self._entries.append(entry)
            self._waiting.change(entry.gradient.nbytes)
            full = len(self._entries) >= self._size
        if full:
            self.begin()
        self._waiting.limit()
        return True

    def begin(self) -> list[Copy]:
        """Start the copies, if they have not begun, and return them; raise the error of copies that could not start."""
        with self._lock:
            if self._copies is None:
                try:
                    runs = runs_of_neighbors(self._entries, lambda each: each.place)
                    copies = [copy for run in runs for copy in self._start(run)]
                except Exception as failure:  # after Ctrl-C they start once more
                    self._failure, copies = without_frames(failure), []
                self._waiting.change(-sum(entry.gradient.nbytes for entry in self._entries))
                self._copies, self._entries = copies, []
            if self._failure is not None:
                raise copy.copy(self._failure) from self._failure.__cause__  # with this frame: it would be a cycle
            return self._copies

    @property
    def order(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return max(copy.order for copy in self.begin())

    def done(self) -> bool:
        return self._copies is not None and all(copy.done() for copy in self._copies)

    def wait(self) -> None:
        wait_for_all(self.begin())


Item = TypeVar("Item")


def runs_of_neighbors(items: Iterable[Item], place_of: Callable[[Item], int]) -> Iterator[Sequence[Item]]:
    """Divide items into runs whose segments are next to each other in their tile. What is between two runs may have
    gradients that arrived before, or values that do not change."""
    ordered = sorted(items, key=place_of)
    begin = 0
    for end, (item, following) in enumerate(pairwise(ordered), start=1):
        if place_of(following) != place_of(item) + 1:
            yield ordered[begin:end]
            begin = end
    if ordered:
        yield ordered[begin:]

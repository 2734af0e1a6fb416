"""Parcels: small gradients of one tile that are copied to the host together, since each copy has a cost of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from longshore.layout import SegmentLayout
from longshore.transfer import CopyHandle, wait_for_all


class Entry(NamedTuple):
    """A gradient that has arrived: its segment, which is at this place of its tile, and the position from which on the
    gradient is valid (see ``Transfer.mark``)."""

    place: int
    segment: SegmentLayout
    gradient: Tensor
    ready: Any


class Parcel(CopyHandle):
    """Handle of the copies of small gradients, which begin when the parcel is full or when somebody waits for it.

    Args:
        size: how many gradients are expected.
        most_bytes: how many bytes of gradients may wait for others.
        start: starts the copies of entries that are neighbors in the tile's buffer.
    """

    def __init__(self, size: int, most_bytes: int, start: Callable[[Sequence[Entry]], list[CopyHandle]]) -> None:
        self._size = size
        self._most_bytes = most_bytes
        self._start = start
        # The thread that brings gradients adds, and the worker waits.
        self._lock = threading.Lock()
        self._entries: list[Entry] = []
        self._bytes = 0
        self._copies: list[CopyHandle] | None = None

    def add(self, entry: Entry) -> bool:
        """Add a gradient, unless the copies have begun; return whether it was added."""
        with self._lock:
            if self._copies is not None:
                return False
            self._entries.append(entry)
            self._bytes += entry.gradient.nbytes
            full = len(self._entries) >= self._size or self._bytes >= self._most_bytes
        if full:
            self.begin()
        return True

    def begin(self) -> list[CopyHandle]:
        """Start the copies, if they have not begun; return them."""
        with self._lock:
            if self._copies is None:
                self._copies = [
                    copy
                    for run in runs_of_neighbors(self._entries, lambda each: each.place)
                    for copy in self._start(run)
                ]
                self._entries = []
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

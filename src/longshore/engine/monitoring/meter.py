"""What the host's lanes did, added up."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from longshore.host import Recorder
from longshore.host.events import DROPPED, KEPT, REDONE
from longshore.kernels import TileSegment
from longshore.transfer import CopyHandle


class Lanes(NamedTuple):
    """Of the time since the last reading; None where there was nothing of the kind."""

    host_bytes_per_second: float | None
    """Of pages, read and written, while passes over them ran."""
    gradient_bytes: int
    """Copied to the host."""
    parameter_bytes: int
    """Copied to the device."""
    hit_rate: float | None
    """Of the tiles that were stepped ahead and decided on, the part that was kept."""


class Meter(Recorder):
    """Counts, from any thread; nothing is kept of a single event."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._pass_ns = 0
        self._pass_bytes = 0
        self._copied = {"copy to host": 0, "publish": 0}
        self._verdicts = {KEPT: 0, REDONE: 0, DROPPED: 0}

    def take(self) -> Lanes:
        """What was counted since the last call."""
        with self._lock:
            decided = sum(self._verdicts.values())
            reading = Lanes(
                1e9 * self._pass_bytes / self._pass_ns if self._pass_ns and self._pass_bytes else None,
                self._copied["copy to host"],
                self._copied["publish"],
                self._verdicts[KEPT] / decided if decided else None,
            )
            self._clear()
        return reading

    def begin(self, name: str, tile: int | None) -> int:
        return time.perf_counter_ns()

    def mark(self, name: str, tile: int | None) -> None:
        if name in self._verdicts:
            with self._lock:
                self._verdicts[name] += 1

    def span(self, name: str, tile: int | None, begin_ns: int) -> None:
        return

    def passed(self, name: str, tile: int, page: Tensor, rows: Sequence[TileSegment], begin_ns: int) -> None:
        if page.device.type != "cpu":  # a kernel that was only enqueued: its time is not known
            return
        took_ns = time.perf_counter_ns() - begin_ns
        num_bytes = 2 * page.shape[0] * page.element_size() * sum(row.gradient.numel() for row in rows)
        with self._lock:
            self._pass_ns += took_ns
            self._pass_bytes += num_bytes

    def copying(self, name: str, tile: int, handle: CopyHandle, begin_ns: int) -> None:
        target = handle.target
        with self._lock:
            self._copied[name] += target.numel() * target.element_size()

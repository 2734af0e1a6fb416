"""Events of tiles: their names, the recorders that receive them, and the order in which they happen.

Recorders are called from every thread that works on a tile, and must not change its work. :data:`SCHEDULE` says
which event waits for which: ``longshore plan`` simulates it, and a test compares it with a traced engine.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import Enum
from typing import Any, NamedTuple

import torch

from longshore.accelerator import Mark
from longshore.kernels import Buffer, TileSegment
from longshore.layout.memory import PIPELINE_DEPTH
from longshore.transfer import Copy

ARRIVE = "arrive"
"""The first gradient of a segment in its window."""
ARRIVE_AGAIN = "arrive again"
COPY_TO_HOST = "copy to host"
ADD = "add"
"""A later gradient of a segment is added to its sum, on the worker."""
MEASURE = "measure early"
"""Squares are added up ahead of the norm, on the worker."""
STEP_AHEAD = "step ahead"
"""A pass into a spare buffer, on the worker."""
KEPT = "kept"
REDONE = "redone"
DROPPED = "dropped"
STEP_IN_PLACE = "step in place"
TRANSFORM = "transform"
"""A parameter is made orthogonal, whole, where it computes."""
PUBLISH = "publish"
"""The copy of one segment's new parameters to the device."""
FETCH = "fetch"
"""The copy to the device of parameters that rest on the host, when they are used."""
WAIT = "wait"
"""The device waits for such a copy."""
NORM = "norm"
DISCARD = "discard"
"""The window was discarded."""


class Recorder(ABC):
    """Receiver of the events of one store. A caller uses one recorder from the beginning of an event to its end.

    Attributes:
        times_copies: whether it reads when copies of a device began and ended; see ``Copy.timed``.
    """

    times_copies = False

    @abstractmethod
    def begin(self, name: str, tile: int | None) -> int:
        """Begin what this thread will report by a method below; return its ``begin_ns`` (``time.perf_counter_ns``)."""

    @abstractmethod
    def mark(self, name: str, tile: int | None) -> None:
        """Report an event that takes no time."""

    @abstractmethod
    def span(self, name: str, tile: int | None, begin_ns: int) -> None:
        """Report the work of this thread from ``begin_ns`` until now."""

    @abstractmethod
    def passed(self, name: str, tile: int, buffer: Buffer, rows: Sequence[TileSegment], begin_ns: int) -> None:
        """Report a pass over ``rows`` of a tile's buffer, ``[arrays, buffer_numel]``, from ``begin_ns`` until now."""

    def working(self, track: str) -> AbstractContextManager[None]:
        """Return a context in which this thread, whose track is ``track``, runs one job."""
        return nullcontext()

    @abstractmethod
    def copying(self, name: str, tile: int | None, handle: Copy, begin_ns: int) -> None:
        """Report a copy that was requested at ``begin_ns`` and may still run."""

    def waited(self, begun: Mark, ended: Mark) -> None:
        """Report that the device waits for parameters between these two events."""
        return


class Recorders(Recorder):
    """Recorder that forwards events to several recorders."""

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self.recorders = recorders

    def begin(self, name: str, tile: int | None) -> int:
        for each in self.recorders:
            each.begin(name, tile)
        return time.perf_counter_ns()

    def mark(self, name: str, tile: int | None) -> None:
        for each in self.recorders:
            each.mark(name, tile)

    def span(self, name: str, tile: int | None, begin_ns: int) -> None:
        for each in self.recorders:
            each.span(name, tile, begin_ns)

    def passed(self, name: str, tile: int, buffer: Buffer, rows: Sequence[TileSegment], begin_ns: int) -> None:
        for each in self.recorders:
            each.passed(name, tile, buffer, rows, begin_ns)

    @contextmanager
    def working(self, track: str) -> Iterator[None]:
        with ExitStack() as stack:
            for each in self.recorders:
                stack.enter_context(each.working(track))
            yield

    def copying(self, name: str, tile: int | None, handle: Copy, begin_ns: int) -> None:
        for each in self.recorders:
            each.copying(name, tile, handle, begin_ns)

    def waited(self, begun: Mark, ended: Mark) -> None:
        for each in self.recorders:
            each.waited(begun, ended)


NO_RECORDER = Recorders(())


def annotating() -> bool:
    """Return whether ``LONGSHORE_ANNOTATE`` asks for :class:`Ranges` from the beginning."""
    return os.environ.get("LONGSHORE_ANNOTATE", "0") not in ("", "0")


class Ranges(Recorder):
    """Recorder that opens ``torch.profiler.record_function`` ranges, and NVTX ranges if CUDA is available.

    There is a range for each pass, copy, norm and job, on the thread that does it.
    """

    def __init__(self) -> None:
        self._nvtx = torch.cuda.is_available()
        self._open = threading.local()
        """Names and ranges that the thread has opened and not closed."""

    def begin(self, name: str, tile: int | None) -> int:
        label = _label(name, tile)
        if self._nvtx:
            torch.cuda.nvtx.range_push(label)
        opened = torch.profiler.record_function(label)
        opened.__enter__()
        self._stack().append((name, opened))
        return 0

    def mark(self, name: str, tile: int | None) -> None:
        if self._nvtx:
            torch.cuda.nvtx.mark(_label(name, tile))

    def span(self, name: str, tile: int | None, begin_ns: int) -> None:
        stack = self._stack()
        # Ranges that an error left open are closed together with the range around them.
        while stack and any(open_name == name for open_name, _ in stack):
            open_name, opened = stack.pop()
            opened.__exit__(None, None, None)
            if self._nvtx:
                torch.cuda.nvtx.range_pop()
            if open_name == name:
                return

    def passed(self, name: str, tile: int, buffer: Buffer, rows: Sequence[TileSegment], begin_ns: int) -> None:
        self.span(name, tile, begin_ns)

    def copying(self, name: str, tile: int | None, handle: Copy, begin_ns: int) -> None:
        self.span(name, tile, begin_ns)

    @contextmanager
    def working(self, track: str) -> Iterator[None]:
        begin_ns = self.begin(track, None)
        try:
            yield
        finally:
            self.span(track, None, begin_ns)

    def _stack(self) -> list[tuple[str, Any]]:
        if not hasattr(self._open, "stack"):
            self._open.stack = []
        return self._open.stack


def _label(name: str, tile: int | None) -> str:
    return f"longshore: {name}" if tile is None else f"longshore: {name}, tile {tile}"


class Track(Enum):
    """Threads and streams, each of which does one thing at a time."""

    COMPUTE = "compute"
    """Forward and backward, and steps of state that stays on the device."""
    TO_HOST = "copies to the host"
    HOST = "host"
    """The threads that step and measure. Where parameters are in host memory, COMPUTE is the same CPUs."""
    TO_DEVICE = "copies to the device"
    COLLECTIVES = "collectives"


class Which(Enum):
    """Tiles whose event another event waits for."""

    SAME = "of the same tile, where it has one"
    ALL = "of every tile"


class Row(NamedTuple):
    """One kind of event: its track, and the events that have to end before it begins."""

    track: Track
    after: tuple[tuple[str, Which], ...] = ()


SCHEDULE: Mapping[str, Row] = {
    ARRIVE: Row(Track.COMPUTE),
    COPY_TO_HOST: Row(Track.TO_HOST, ((ARRIVE, Which.SAME),)),
    STEP_AHEAD: Row(Track.HOST, ((COPY_TO_HOST, Which.SAME),)),
    NORM: Row(Track.HOST, ((ARRIVE, Which.ALL), (COPY_TO_HOST, Which.ALL))),
    # A step in place waits for the verdict, because it cannot be undone.
    STEP_IN_PLACE: Row(Track.HOST, ((NORM, Which.ALL), (STEP_AHEAD, Which.ALL), (COPY_TO_HOST, Which.SAME))),
    PUBLISH: Row(Track.TO_DEVICE, ((NORM, Which.ALL), (STEP_AHEAD, Which.ALL), (STEP_IN_PLACE, Which.SAME))),
}


class Move(Enum):
    """Stages of a commit for a tile that was not stepped ahead."""

    FILL = "copy gradients that are not on the host yet"
    FINISH = "step it, and publish it"


def commit_moves(count: int, depth: int = PIPELINE_DEPTH) -> Iterator[tuple[Move, int]]:
    """Yield the moves of a commit, with each tile's index; at most ``depth`` tiles are filled and not finished."""
    for place in range(count):
        if place >= depth:
            yield Move.FINISH, place - depth
        yield Move.FILL, place
    for place in range(max(0, count - depth), count):
        yield Move.FINISH, place

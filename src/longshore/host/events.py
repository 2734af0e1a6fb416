"""The events in a tile's life: their names, who is told of them, and which event waits for which.

Recorders are told from every thread that has to do with a tile; what is told must not change what is done.
:data:`SCHEDULE` states as data what waits for what: ``longshore plan`` simulates it, and a test compares it with a
traced engine. It has no tensors and no threads.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import Enum
from typing import NamedTuple

from torch import Tensor

from longshore.kernels import TileSegment
from longshore.transfer import CopyHandle

ARRIVE = "arrive"
"""The first gradient of a segment in its window."""
ARRIVE_AGAIN = "arrive again"
COPY_TO_HOST = "copy to host"
STEP_AHEAD = "step ahead"
"""A pass into a spare page, on the worker."""
KEPT = "kept"
REDONE = "redone"
DROPPED = "dropped"
STEP_IN_PLACE = "step in place"
PUBLISH = "publish"
"""The copy of one segment's new parameters to the device."""
NORM = "norm"
DISCARD = "discard"
"""The window was discarded."""


class Recorder(ABC):
    """The policy of one store. A caller keeps the recorder from an event's beginning to its end."""

    @abstractmethod
    def begin(self, name: str, tile: int | None) -> int:
        """This thread begins what one of the calls below will tell of. Returns their ``begin_ns``: nanoseconds of
        ``time.perf_counter_ns``."""

    @abstractmethod
    def mark(self, name: str, tile: int | None) -> None:
        """Something that takes no time."""

    @abstractmethod
    def span(self, name: str, tile: int | None, begin_ns: int) -> None:
        """Something that this thread did from ``begin_ns`` until now."""

    @abstractmethod
    def passed(self, name: str, tile: int, page: Tensor, rows: Sequence[TileSegment], begin_ns: int) -> None:
        """A pass over ``rows`` of a tile's page, ``[page_arrays, page_numel]``, from ``begin_ns`` until now."""

    def working(self, lane: str) -> AbstractContextManager[None]:
        """This thread, which is a lane's, runs one job inside."""
        return nullcontext()

    @abstractmethod
    def copying(self, name: str, tile: int, handle: CopyHandle, begin_ns: int) -> None:
        """A copy that was asked for at ``begin_ns`` and may still run."""


class NoRecorder(Recorder):
    def begin(self, name: str, tile: int | None) -> int:
        return 0

    def mark(self, name: str, tile: int | None) -> None:
        return

    def span(self, name: str, tile: int | None, begin_ns: int) -> None:
        return

    def passed(self, name: str, tile: int, page: Tensor, rows: Sequence[TileSegment], begin_ns: int) -> None:
        return

    def copying(self, name: str, tile: int, handle: CopyHandle, begin_ns: int) -> None:
        return


NO_RECORDER = NoRecorder()


class Several(Recorder):
    """Tells each of ``recorders``."""

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self.recorders = tuple(recorders)

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

    def passed(self, name: str, tile: int, page: Tensor, rows: Sequence[TileSegment], begin_ns: int) -> None:
        for each in self.recorders:
            each.passed(name, tile, page, rows, begin_ns)

    @contextmanager
    def working(self, lane: str) -> Iterator[None]:
        with ExitStack() as stack:
            for each in self.recorders:
                stack.enter_context(each.working(lane))
            yield

    def copying(self, name: str, tile: int, handle: CopyHandle, begin_ns: int) -> None:
        for each in self.recorders:
            each.copying(name, tile, handle, begin_ns)


def joined(recorders: Sequence[Recorder]) -> Recorder:
    """One that tells all of them."""
    if not recorders:
        return NO_RECORDER
    return recorders[0] if len(recorders) == 1 else Several(recorders)


PIPELINE_DEPTH = 4
"""Tiles under way at once: one coming down, one stepped, one going up, one spare for noise."""


class Lane(Enum):
    """What does one thing at a time."""

    COMPUTE = "compute"
    """Forward and backward, and steps of state that stays on the device."""
    TO_HOST = "copies to the host"
    HOST = "host"
    """The threads that step and measure. Where parameters are in host memory, COMPUTE is the same CPUs."""
    TO_DEVICE = "copies to the device"
    COLLECTIVES = "collectives"


class Which(Enum):
    """Whose event is waited for."""

    SAME = "of the same tile, where it has one"
    ALL = "of every tile"


class Row(NamedTuple):
    """One kind of event: its lane, and what has to end before it begins."""

    lane: Lane
    after: tuple[tuple[str, Which], ...] = ()


SCHEDULE: Mapping[str, Row] = {
    ARRIVE: Row(Lane.COMPUTE),
    COPY_TO_HOST: Row(Lane.TO_HOST, ((ARRIVE, Which.SAME),)),
    STEP_AHEAD: Row(Lane.HOST, ((COPY_TO_HOST, Which.SAME),)),
    NORM: Row(Lane.HOST, ((ARRIVE, Which.ALL), (COPY_TO_HOST, Which.ALL))),
    # In place only after the verdict: there is no way back.
    STEP_IN_PLACE: Row(Lane.HOST, ((NORM, Which.ALL), (STEP_AHEAD, Which.ALL), (COPY_TO_HOST, Which.SAME))),
    PUBLISH: Row(
        Lane.TO_DEVICE,
        ((NORM, Which.ALL), (STEP_AHEAD, Which.ALL), (STEP_IN_PLACE, Which.SAME)),
    ),
}


class Move(Enum):
    """What a commit does with one of the tiles that were not stepped ahead."""

    FILL = "bring down what is not on the host yet"
    FINISH = "step it, and publish it"


def commit_moves(count: int, depth: int) -> Iterator[tuple[Move, int]]:
    """The moves of a commit over ``count`` tiles, by their places: at most ``depth`` are filled and not finished."""
    for place in range(count):
        if place >= depth:
            yield Move.FINISH, place - depth
        yield Move.FILL, place
    for place in range(max(0, count - depth), count):
        yield Move.FINISH, place


def debugging() -> bool:
    """Whether ``LONGSHORE_DEBUG`` asks for checks that cost time."""
    return os.environ.get("LONGSHORE_DEBUG", "0") not in ("", "0")

"""Which tile waits for what, as data: the engine steps by it, and ``longshore plan`` simulates it.

Pure: no tensors, no threads. The table has one row for each event that is
recorded (:mod:`longshore.host.recorder`): the lane it takes, one event at a
time in the order in which they were asked for, and the events that have to end
before it. A test compares it with what a traced engine did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import NamedTuple

from longshore.host.recorder import ARRIVE, COPY_TO_HOST, NORM, PUBLISH, STEP_AHEAD, STEP_IN_PLACE

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

"""What ranks meet for."""

from __future__ import annotations

from enum import IntEnum


class Action(IntEnum):
    """What a rank is about to do together with the others."""

    BACKWARD = 1
    STEP = 2
    COMMIT = 3
    READ = 4
    CLOSE = 5
    GATHER = 6
    LEAVE = 7
    """Not waited for: the others are told, wherever they are."""
    SAVE = 8
    LOAD = 9

    @property
    def words(self) -> str:
        return {
            Action.BACKWARD: "in backward",
            Action.STEP: "in step()",
            Action.COMMIT: "about to step",
            Action.READ: "reading optimizer state",
            Action.CLOSE: "in the last backward",
            Action.GATHER: "gathering parameters",
            Action.LEAVE: "giving up its window",
            Action.SAVE: "saving a checkpoint",
            Action.LOAD: "loading a checkpoint",
        }[self]

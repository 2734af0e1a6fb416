"""Messages of ranks at a meeting: the next action of each, and its window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from longshore.errors import GradientError, RankError

REFUSED = -1
"""Verdict of a rank that found at the last moment that it cannot step."""

ADVICE = (
    "every rank has to run the same number of backwards and steps (at stage 3 also of forwards, those of evaluations "
    "included), with the same parameters, in the same order"
)

NOTE_NUMEL = 24
"""Count of the numbers that every message of a meeting has room for."""


class Action(IntEnum):
    """Action that a rank is about to take together with the others: a number to send, and words for errors."""

    words: str

    def __new__(cls, number: int, words: str) -> Action:
        action = int.__new__(cls, number)
        action._value_, action.words = number, words
        return action

    BACKWARD = 1, "in backward"
    STEP = 2, "in step()"
    COMMIT = 3, "about to step"
    READ = 4, "reading optimizer state"
    CLOSE = 5, "in the last backward"
    GATHER = 6, "gathering parameters"
    LEAVE = 7, "giving up its window"
    """No rank waits for this action: it informs the other ranks, whatever they are doing."""
    SAVE = 8, "saving a checkpoint"
    LOAD = 9, "loading a checkpoint"
    MEASURE = 10, "measuring the norm"
    TELL = 11, "telling the others what it has"
    """Goes on with what the ranks met for."""
    ALONE = 12, "in step() without an engine.backward() before it"


@dataclass
class Row:
    """One rank's side of a meeting, sent as numbers.

    Attributes:
        action: the rank's next action.
        number: which of these, such as the module that is gathered.
        window: number of the rank's window; at TELL the action of the last meeting.
        discards: how many windows the rank has discarded, or had when it gave one up.
        gave_up: whether it gave up a window, and says so for the first time.
        note: further numbers.
    """

    action: Action
    number: int
    window: int
    discards: int = 0
    gave_up: bool = False
    note: Sequence[int] = ()

    @classmethod
    def received(cls, numbers: Sequence[int]) -> Row:
        """Return the row that was sent as these numbers."""
        action, number, window, discards, gave_up, *note = numbers
        return cls(Action(action), number, window, discards, bool(gave_up), note)

    def numbers(self) -> list[int]:
        """Return the numbers to send, as many as every other row has."""
        head = [self.action, self.number, self.window, self.discards, int(self.gave_up)]
        return [*head, *self.note, *[0] * (NOTE_NUMEL - len(self.note))]

    @property
    def reason(self) -> tuple[Action, int, int]:
        """The rank's reason to come: ranks meet for the same."""
        return self.action, self.number, self.window

    def words(self, modules: Sequence[str], window: bool = False) -> str:
        """Return the action in words, for messages. ``modules``: the names of modules that are gathered; ``window``:
        whether to name the window."""
        if self.action is Action.TELL:
            return Action(self.window).words
        said = self.action.words
        if self.action is Action.BACKWARD and self.number:
            said = f"{said} {self.number} of its window"
        elif self.action is Action.GATHER:
            said = f"{said} of {modules[self.number]}"
        return f"{said} (window {self.window})" if window else said


@dataclass(eq=False)
class Uncounted:
    """How many windows this rank discarded and did not count: others gave them up, and it learned that later."""

    windows: int = 0


class Epoch:
    """The window of this rank, as one of all that the ranks stepped or gave up.

    Attributes:
        number: how many windows were stepped or given up: the same number on all ranks that meet. A rank that gives up
            its window counts it at once and tells the others. They count it when they are told, and do not count it
            again when they discard their part of that window. Otherwise a rank that is told in a forward and one that
            is told in ``step()`` would never meet again.
        told: whether another rank gave up a window that this rank has not discarded yet.
    """

    def __init__(self) -> None:
        self.number = 0
        self.told = False

    def hear(self, number: int) -> None:
        """Note that another rank gave up its window and has been at window ``number`` since."""
        if number > self.number:
            self.number, self.told = number, True

    def give_up(self) -> bool:
        """Give up the window of this rank, and return whether the others have to be told."""
        if self.told:
            return False
        self.number += 1
        return True


@dataclass(eq=False)
class Meeting:
    """Meeting at which this rank waits for the others to do the same; ``doing`` names that in messages."""

    row: Row
    doing: str
    # These change each time that this rank comes to the meeting.
    rows: Any = None
    work: Any = None
    # These change while it waits.
    since: float = 0.0
    told: bool = False


def different_parameters(said: str) -> RankError:
    """Return the error for ranks whose actions are the same, as ``said``."""
    return RankError(f"all ranks are {said}, but of different parameters; {ADVICE}")


def explain_difference(rows: Sequence[Row], rank: int, modules: Sequence[str]) -> None:
    """Raise an error since the ranks met for different things; return if ``rank`` refused the step itself."""
    if any(row.action is not Action.COMMIT for row in rows):
        said = [row.words(modules) for row in rows]
        if len(set(said)) == 1:
            said = [row.words(modules, window=True) for row in rows]
        if len(set(said)) == 1:
            raise different_parameters(said[0])
        told = ", ".join(f"rank {other} is {each}" for other, each in enumerate(said))
        raise RankError(f"the ranks do different things: {told}; {ADVICE}")
    refusing = [other for other, row in enumerate(rows) if row.number == REFUSED]
    if not refusing:
        raise RankError(
            "the ranks are about to step differently: other parameters, learning rates, options or "
            "clipping; give every rank's optimizer the same groups, schedule and settings"
        )
    if rank not in refusing:
        raise GradientError(f"rank {refusing[0]} refused the step (see its own error); nothing was stepped")

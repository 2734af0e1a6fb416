"""Bets on verdicts: how much memory they may take, what came of them, and whether to make the next ones."""

from __future__ import annotations

from typing import NamedTuple

from longshore.byte_sizes import parse_memory_budget
from longshore.machine import available_bytes

SpeculationMemory = int | str
"""Argument of :func:`longshore.byte_sizes.parse_memory_budget`; 100 % is the memory of a spare for every tile."""

_AUTO_PART = 4
_MEMORY = 0.75
"""Weight of all earlier verdicts against the last one: about four windows count."""
_ENOUGH = 0.5


def memory_for_speculation() -> int:
    """Return how many bytes ``"auto"`` grants at most to all processes of this machine together."""
    return available_bytes() // _AUTO_PART


def speculation_budget(memory: SpeculationMemory, most: int, taken: int = 0) -> int:
    """Return the number of bytes for spares, if a spare for every tile would take ``most``; of a fixed number of bytes,
    others have ``taken`` some."""
    budget = parse_memory_budget(memory)
    if budget.byte_count is not None:
        return budget.byte_count - taken
    return min(most, memory_for_speculation() - taken) if budget.share is None else int(most * budget.share)


class SpeculationRecord(NamedTuple):
    """State of speculation, and what it did with tiles in the last window."""

    score: float
    """How often the assumed verdict was the true one lately, from 0 to 1."""
    bets: bool
    """Whether tiles will be stepped ahead in the next window."""
    spares: int
    """Tiles that can be stepped ahead at once."""
    begun: int = 0
    kept: int = 0
    redone: int = 0
    """Tiles stepped ahead, and then again with the true scale, rule or parameters."""
    dropped: int = 0
    """Tiles stepped ahead in vain: one more gradient came, or the window was discarded."""
    waited: int = 0
    """Tiles that were complete when no spare was left."""

    def and_of(self, other: SpeculationRecord) -> SpeculationRecord:
        """Return the record of the tiles of both."""
        counts = (mine + theirs for mine, theirs in zip(self[2:], other[2:], strict=True))
        return SpeculationRecord(min(self.score, other.score), self.bets or other.bets, *counts)


class Predictor:
    """Predictor of verdicts, which bets as long as most of the last verdicts were the assumed one.

    It learns from every window, so that speculation stays off only while every window is clipped.
    """

    def __init__(self) -> None:
        self.score = 1.0
        """How often the assumption held lately, from 0 to 1."""

    @property
    def bets(self) -> bool:
        return self.score >= _ENOUGH

    def observe(self, held: bool) -> None:
        """Learn whether the assumption held in one window."""
        self.score = _MEMORY * self.score + (1.0 - _MEMORY) * held

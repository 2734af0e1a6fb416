"""Whether a speculative step is worth its time: read from how the last verdicts went."""

from __future__ import annotations

_MEMORY = 0.75
"""Weight of all earlier verdicts against the last one: some four windows count."""
_ENOUGH = 0.5


class Predictor:
    """Bets while the last verdicts were mostly the assumed one.

    It learns from every window, whether or not anything was bet on it, so that
    speculation stays off while clipping always acts and comes back when it no
    longer does.
    """

    def __init__(self) -> None:
        self.score = 1.0
        """How often the assumption held lately, from 0 to 1."""

    @property
    def bets(self) -> bool:
        return self.score >= _ENOUGH

    def observe(self, held: bool) -> None:
        """The verdict of one window: did the assumption hold?"""
        self.score = _MEMORY * self.score + (1.0 - _MEMORY) * held

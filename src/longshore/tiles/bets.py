"""Before the verdict: whether to bet on it, the memory for that, the outcome, and norms that are known early."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from longshore.byte_sizes import parse_memory_budget
from longshore.kernels import Kernels, Scale
from longshore.machine import available_bytes
from longshore.tiles.tile import Segment, Tile
from longshore.transfer import Copy, wait_for_all

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
    """State of speculation, and counts of its tiles in the last window."""

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


class Due(NamedTuple):
    """A parameter whose whole gradient is queued, with the tensors that will have it and the copies to wait for."""

    parameter: int
    versions: list[int]
    gradients: list[Tensor]
    copies: list[Copy]


class _Squares(NamedTuple):
    versions: list[int]
    scale: Scale
    blocks: list[float]


class EarlyNorms:
    """Sums of squares of a window's gradients; ``parts_of`` returns the tiles and segments of a parameter.

    A parameter is measured once its last tile is complete. Its sums are valid until any of its tiles gets a gradient.
    """

    def __init__(self, kernels: Kernels, parts_of: Callable[[int], Sequence[tuple[Tile, Segment]]]) -> None:
        self._kernels = kernels
        self._parts_of = parts_of
        self.wanted = False
        """Whether the last window asked for a norm."""
        self._asked = False
        self._sums: dict[int, _Squares] = {}

    def due(self, tile: Tile) -> list[Due]:
        """Return the parameters of a tile that can be measured after the jobs that are queued now.

        Versions and gradients are read here, while no gradient can arrive: on the worker, a version could already
        count an arrival that is not queued yet.
        """
        found = []
        for parameter in tile.segments:
            parts = self._parts_of(parameter)
            if all(part.complete and segment.arrivals > 0 for part, segment in parts):
                gradients = [part.queued_gradient(segment) for part, segment in parts]
                copies = [segment.handle for _, segment in parts if segment.handle is not None]
                found.append(Due(parameter, [part.version for part, _ in parts], gradients, copies))
        return found

    def measure(self, due: Sequence[Due], scale: Scale) -> None:
        """Measure parameters on the worker, after every addition that was queued when they became due."""
        wait_for_all(copy for one in due for copy in one.copies)
        blocks = self._kernels.block_sums([one.gradients for one in due], scale)
        for one, sums in zip(due, blocks, strict=True):
            self._sums[one.parameter] = _Squares(one.versions, scale, sums)

    def known(self, scale: Scale) -> Mapping[int, Sequence[float]]:
        """Return the sums of blocks that are still valid, by parameter; the worker must be drained."""
        self._asked = True
        return {
            parameter: sums.blocks
            for parameter, sums in self._sums.items()
            if sums.scale == scale and sums.versions == [tile.version for tile, _ in self._parts_of(parameter)]
        }

    def forget(self, parameters: Mapping[int, object]) -> None:
        """Drop the sums of parameters whose gradients are about to be written."""
        for parameter in self._sums.keys() & parameters.keys():  # as long as the shorter of both
            del self._sums[parameter]

    def end_window(self, stepped: bool) -> None:
        """Drop all sums. If a window that was stepped asked for a norm, the next one is expected to ask, too."""
        self._sums.clear()
        if stepped:
            self.wanted, self._asked = self._asked, False

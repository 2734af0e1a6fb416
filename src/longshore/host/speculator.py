"""The policy of stepping tiles before the verdict, as a store sees it; this one never does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from longshore.host.memory import PagePool, Slot
from longshore.host.stepping import ParameterStep
from longshore.host.tile import Segment, Tile
from longshore.kernels import HostRule, Scale


class Forecast(ABC):
    """What the next commit will be given, as far as is known during backward. A wrong one costs time, never bits."""

    @abstractmethod
    def scale(self) -> Scale:
        """What gradients will be multiplied by if they are not clipped."""

    @abstractmethod
    def rules(self) -> Mapping[int, HostRule]:
        """By parameter: how each of them would be stepped now."""


class Record(NamedTuple):
    """What speculation did in the last window, by tiles, and how it stands."""

    score: float
    """How often the assumed verdict was the true one lately, from 0 to 1."""
    bets: bool
    """Whether the next window is bet on."""
    spares: int
    """Tiles that can be stepped ahead at once."""
    begun: int = 0
    kept: int = 0
    redone: int = 0
    """Stepped ahead, and again with the true scale or rule."""
    dropped: int = 0
    """Stepped ahead for nothing: one more gradient came, or the window was discarded."""
    waited: int = 0
    """Complete, but no spare was left."""


class Speculator:
    """Steps nothing ahead: every tile waits for the verdict; :class:`~longshore.host.speculation.Ahead` does."""

    forecast: Forecast | None = None
    spares: PagePool | None = None
    """Pages to step into ahead of the verdict; None: there are none."""
    record: Record | None = None
    """None: nothing is ever bet on."""
    spare_bytes: int = 0
    """Counted bytes of spare pages and outputs."""

    def lend(self, page_numel: int) -> Tensor | None:
        """A spare page, for :attr:`spares` to get it or another one back; None: all of them are in use."""
        return None

    def consider(self, tile: Tile) -> None:
        """A gradient arrived: perhaps the last that the tile will get. One caller at a time."""

    def known_squares(self, scale: Scale) -> Mapping[int, Sequence[float]]:
        """By parameter, the sums of squares of its blocks, where they were added up in backward and still hold."""
        return {}

    def hold(self) -> None:
        """Passes that have not begun are put off: what is measured for the verdict comes first."""

    def resume(self) -> None:
        """After :meth:`hold` and :meth:`harvest`: go on with them, while the verdict is on its way."""

    def harvest(self) -> None:
        """The worker is drained: every pass has ended or is held. Afterwards no other tile is STEPPING."""

    def void(self, tile: Tile) -> None:
        """Something that a pass read is about to change; after :meth:`harvest`."""

    def drop(self, tile: Tile) -> None:
        """The tile was moved, and what was stepped ahead for it is not wanted any more."""

    def set_arrays(self, page_arrays: int) -> None:
        """Pages have another number of arrays from here on; no tile is STEPPING or STEPPED."""

    def verdict(self, tile: Tile, active: Sequence[tuple[Segment, ParameterStep]], scale: Scale) -> Slot | None:
        """Where the new parameters are, if the tile was stepped ahead as it is to be stepped; it is COMMITTED then."""
        return None

    def end_window(self, tiles: Sequence[Tile], scale: Scale | None) -> None:
        """After :meth:`harvest`; ``scale`` is what the window was stepped with, None where it was discarded."""

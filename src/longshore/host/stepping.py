"""What is stepped, and stepping a tile ahead of the verdict into a spare page that is kept or dropped.

A speculative step has three parts, so that the long one can run on any thread
while gradients arrive: :func:`begin_speculation` and :func:`end_speculation`
move the tile and are called one at a time with everything else that moves it;
:func:`run_speculation` touches no tile. :class:`Speculator` is the policy of one backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from longshore.host.memory import PagePool, Slot
from longshore.host.tile import Segment, SparePage, Tile, TileEvent
from longshore.kernels import HostRule, Kernels, Scale, TileSegment
from longshore.transfer import CopyHandle


class ParameterStep(NamedTuple):
    """One parameter that has a gradient in this window.

    ``target`` is where its new values go; ``gradient`` is None where the store
    holds the gradient already. Both are flat, contiguous, on the device.
    """

    rule: HostRule
    target: Tensor
    gradient: Tensor | None


class SegmentStep(NamedTuple):
    """One segment that has a gradient in this window: its rule, and where its new values go."""

    segment: Segment
    rule: HostRule
    output: Tensor


class Speculation(NamedTuple):
    """A step into a spare page, under way. It owns all that the pass reads and writes."""

    version: int
    """Of the tile, when it began."""
    page: Tensor
    spare: SparePage
    rows: list[TileSegment]
    rules: list[HostRule]
    copies: list[CopyHandle]
    """On their way to the host when it began."""
    idle: tuple[slice, ...]
    """The parts of the page that have no gradient."""


def step_table(
    steps: Sequence[SegmentStep], gradients: Sequence[Tensor] | None = None
) -> tuple[list[TileSegment], list[HostRule]]:
    """What a kernel is told: a row for each segment, and the rules that the rows count.

    ``gradients`` are those of the segments; None: they have arrived.
    """
    # By identity: parameters of one group and history share a rule, and hashing one costs more than a row.
    rules: dict[int, tuple[int, HostRule]] = {}
    rows = []
    for place, (segment, rule, output) in enumerate(steps):
        index, _ = rules.setdefault(id(rule), (len(rules), rule))
        gradient = segment.gradient if gradients is None else gradients[place]
        assert gradient is not None
        rows.append(TileSegment(segment.layout.page_offset, gradient, output, index))
    return rows, [rule for _, rule in rules.values()]


def idle_parts(tile: Tile, steps: Sequence[SegmentStep]) -> tuple[slice, ...]:
    """The parts of the tile's page that are not stepped."""
    stepped = {segment.layout.parameter for segment, _, _ in steps}
    return tuple(segment.in_page for segment in tile.layout.segments if segment.parameter not in stepped)


def begin_speculation(tile: Tile, steps: Sequence[SegmentStep], into: Tensor) -> Speculation:
    """READY -> STEPPING, into a spare page.

    The tile's page and its gradients will only be read, so the outputs must
    not be the gradients' own memory, nor the parameters. Gradients may still be
    on their way.
    """
    rows, rules = step_table(steps, [tile.queued_gradient(step.segment) for step in steps])
    copies = [step.segment.handle for step in steps if step.segment.handle is not None]
    page = tile.page
    assert page is not None
    tile.move(TileEvent.SPECULATE)
    spare = SparePage(into, tuple(step.output for step in steps))
    return Speculation(tile.version, page, spare, rows, rules, copies, idle_parts(tile, steps))


def run_speculation(speculation: Speculation, scale: Scale, kernels: Kernels) -> None:
    """Write what the step would give into the spare page, once the gradients are here."""
    for copy in speculation.copies:
        copy.wait()
    page, target = speculation.page, speculation.spare.page
    for part in speculation.idle:  # idle means untouched, in either page
        target[:, part] = page[:, part]
    kernels.step_tile(page, target, speculation.rows, speculation.rules, scale)


def end_speculation(tile: Tile, speculation: Speculation, spares: PagePool) -> bool:
    """STEPPING -> STEPPED. Where a gradient came meanwhile, or the window was discarded, the
    version is old: the spare page is dropped, the tile stays what it is, and the result is False."""
    if tile.version != speculation.version:
        spares.give_back(speculation.spare.page)
        return False
    tile.move(TileEvent.SPECULATED)
    tile.spare = speculation.spare
    return True


def fail_speculation(tile: Tile, speculation: Speculation, spares: PagePool) -> None:
    """STEPPING -> READY: :func:`run_speculation` raised. Nothing is lost, the tile's page is untouched."""
    if end_speculation(tile, speculation, spares):
        redo(tile, spares)


def keep(tile: Tile, spares: PagePool) -> SparePage:
    """STEPPED -> COMMITTED: the spare page is the tile's, the old one goes back to the pool."""
    spare, old = tile.spare, tile.page
    tile.move(TileEvent.KEEP)
    assert spare is not None and old is not None
    tile.page, tile.spare = spare.page, None
    spares.give_back(old)
    return spare


def redo(tile: Tile, spares: PagePool) -> None:
    """STEPPED -> READY: the scale was another; every bit of the page is as it was."""
    tile.move(TileEvent.REDO)
    drop(tile, spares)


def drop(tile: Tile, spares: PagePool) -> None:
    """Give the spare page back, if there is one."""
    if tile.spare is not None:
        spares.give_back(tile.spare.page)
        tile.spare = None


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

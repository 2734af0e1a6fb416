"""Stepping one tile: at the verdict, or ahead of it into a spare page that is kept or dropped.

A speculative step has three parts, so that the long one can run on any thread
while gradients arrive: :func:`begin_speculation` and :func:`end_speculation`
move the tile and are called one at a time with everything else that moves it;
:func:`run_speculation` touches no tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from longshore.host.events import STEP_IN_PLACE
from longshore.host.memory import PagePool
from longshore.host.tile import Segment, SparePage, Ticket, Tile, TileEvent
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

    ticket: Ticket
    page: Tensor
    spare: SparePage
    rows: list[TileSegment]
    rules: list[HostRule]
    copies: list[CopyHandle]
    """On their way to the host when it began."""
    idle: tuple[slice, ...]
    """The parts of the page that have no gradient."""


def _table(
    steps: Sequence[SegmentStep], gradient_of: Callable[[Segment], Tensor]
) -> tuple[list[TileSegment], list[HostRule]]:
    # By identity: parameters of one group and history share a rule, and hashing one costs more than a row.
    rules: dict[int, tuple[int, HostRule]] = {}
    rows = []
    for segment, rule, output in steps:
        index, _ = rules.setdefault(id(rule), (len(rules), rule))
        rows.append(TileSegment(segment.layout.page_offset, gradient_of(segment), output, index))
    return rows, [rule for _, rule in rules.values()]


def _idle_parts(tile: Tile, steps: Sequence[SegmentStep]) -> tuple[slice, ...]:
    stepped = {segment.layout.parameter for segment, _, _ in steps}
    return tuple(segment.in_page for segment in tile.layout.segments if segment.parameter not in stepped)


def commit_tile(
    tile: Tile, steps: Sequence[SegmentStep], scale: Scale, kernels: Kernels, into: Tensor | None = None
) -> None:
    """FILLING or READY -> COMMITTED: the tile's page and the outputs hold the new values.

    With ``into`` that becomes the tile's page, and the one that it had is only read; otherwise it is stepped in place.

    Raises:
        BaseException: what the pass raised; the tile is then BROKEN.
    """
    rows, rules = _table(steps, Segment.wait)
    page = tile.page
    assert page is not None
    target = page if into is None else into
    tile.move(TileEvent.COMMIT)
    recorder = tile.recorder
    begin_ns = recorder.begin(STEP_IN_PLACE, tile.layout.index)
    try:
        if into is not None:
            for part in _idle_parts(tile, steps):  # idle means untouched, in either page
                into[:, part] = page[:, part]
        kernels.step_tile(page, target, rows, rules, scale)
    except BaseException:
        tile.move(TileEvent.COMMIT_FAILED)
        raise
    finally:
        recorder.passed(STEP_IN_PLACE, tile.layout.index, page, rows, begin_ns)
    tile.page = target
    tile.move(TileEvent.COMMIT_DONE)


def begin_speculation(tile: Tile, steps: Sequence[SegmentStep], into: Tensor) -> Speculation:
    """READY -> STEPPING, into a spare page.

    The tile's page and its gradients will only be read, so the outputs must
    not be the gradients' own memory, nor the parameters. Gradients may still be
    on their way.
    """
    rows, rules = _table(steps, tile.queued_gradient)
    copies = [step.segment.handle for step in steps if step.segment.handle is not None]
    page = tile.page
    assert page is not None
    tile.move(TileEvent.SPECULATE)
    spare = SparePage(into, tuple(step.output for step in steps))
    return Speculation(tile.ticket, page, spare, rows, rules, copies, _idle_parts(tile, steps))


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
    ticket is old: the spare page is dropped, the tile stays what it is, and the result is False."""
    if tile.ticket != speculation.ticket:
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

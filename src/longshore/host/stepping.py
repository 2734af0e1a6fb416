"""Stepping one tile: in place, or out of place into a spare page that is kept or dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from longshore.host.memory import PagePool
from longshore.host.tile import Segment, SparePage, Ticket, Tile
from longshore.host.tile_state import TileEvent
from longshore.kernels import AdamRule, HostKernels, Scale, TileSegment


class SegmentStep(NamedTuple):
    """One segment that has a gradient in this window: its rule, and where its new values go."""

    segment: Segment
    rule: AdamRule
    output: Tensor


def _table(steps: Sequence[SegmentStep]) -> tuple[list[TileSegment], list[AdamRule]]:
    rules: dict[AdamRule, int] = {}
    rows = []
    for segment, rule, output in steps:
        index = rules.setdefault(rule, len(rules))
        rows.append(TileSegment(segment.layout.page_offset, segment.wait(), output, index))
    return rows, list(rules)


def step_in_place(tile: Tile, steps: Sequence[SegmentStep], scale: Scale, kernels: HostKernels) -> None:
    """FILLING or READY -> COMMITTED: the tile's page and the outputs hold the new values.

    Raises:
        BaseException: what the pass raised; the tile is then BROKEN.
    """
    rows, rules = _table(steps)
    page = tile.page
    assert page is not None
    tile.move(TileEvent.COMMIT)
    try:
        kernels.step_tile(page, page, rows, rules, scale)
    except BaseException:
        tile.move(TileEvent.COMMIT_FAILED)
        raise
    tile.move(TileEvent.COMMIT_DONE)


def speculate(tile: Tile, steps: Sequence[SegmentStep], scale: Scale, kernels: HostKernels, spares: PagePool) -> Ticket:
    """READY -> STEPPING: write what the step would give into a spare page.

    The tile's page and its gradients are only read, so the outputs must not be
    the gradients' own memory. Returns the ticket to give to
    :func:`end_speculation`.
    """
    rows, rules = _table(steps)
    page = tile.page
    assert page is not None
    tile.move(TileEvent.SPECULATE)
    ticket = tile.ticket
    target = spares.take(page.shape[1])
    stepped = {segment.layout.parameter for segment, _, _ in steps}
    for segment in tile.layout.segments:
        if segment.parameter not in stepped:  # idle means untouched, in either page
            part = slice(segment.page_offset, segment.page_offset + segment.numel)
            target[:, part] = page[:, part]
    kernels.step_tile(page, target, rows, rules, scale)
    tile.spare = SparePage(target, tuple(step.output for step in steps))
    return ticket


def end_speculation(tile: Tile, ticket: Ticket, spares: PagePool) -> bool:
    """STEPPING -> STEPPED, or, where one more gradient came meanwhile, the spare page is dropped."""
    if tile.ticket != ticket:
        drop(tile, spares)
        return False
    tile.move(TileEvent.SPECULATED)
    return True


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

"""Where every element lives: parameters -> segments -> tiles, as frozen offsets.

Pure: no tensors, no devices. A tile is a run of consecutive elements of the
parameters that it is given, cut every ``tile_numel`` elements; a segment is one
parameter's part of one tile.

In a page, each segment begins at a multiple of :data:`SEGMENT_ALIGNMENT`
elements, so that no two segments share a cache line and streaming stores find
whole lines. The gaps are never read or written, and are not counted in
``tile_numel``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

SEGMENT_ALIGNMENT = 16
"""Elements: 64 bytes of float32, 32 of bfloat16."""


class Slab(NamedTuple):
    """``[start, start + numel)`` along one dimension of a tensor, and all of the others."""

    dim: int
    start: int
    numel: int

    def shape_in(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Its own, in a tensor of this shape."""
        return (*shape[: self.dim], self.numel, *shape[self.dim + 1 :])


@dataclass(frozen=True)
class SegmentLayout:
    """Elements ``[parameter_offset, parameter_offset + numel)`` of one parameter."""

    parameter: int
    parameter_offset: int
    page_offset: int
    numel: int

    @property
    def in_page(self) -> slice:
        """Its elements in each of a page's arrays."""
        return slice(self.page_offset, self.page_offset + self.numel)


@dataclass(frozen=True)
class TileLayout:
    """One tile's segments, in order of ``page_offset``."""

    index: int
    segments: tuple[SegmentLayout, ...]
    page_numel: int
    """Length of each of a page's arrays, gaps included."""

    @property
    def numel(self) -> int:
        return sum(segment.numel for segment in self.segments)


def align(numel: int) -> int:
    """``numel`` rounded up to :data:`SEGMENT_ALIGNMENT`."""
    return -(-numel // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT


class TileRun(NamedTuple):
    """Consecutive tiles of one size."""

    tiles: int
    numel: int
    page_numel: int
    parameters: tuple[int, ...]
    """Those that have a segment in each of them."""


def tile_runs(parameters: Iterable[tuple[int, int]], tile_numel: int) -> tuple[TileRun, ...]:
    """The tiles of :func:`plan_tiles`, counted and not made: as many entries as there are parameters, at most about two
    for each, however large they are. The arguments and errors are those of that one."""
    if tile_numel < 1:
        raise ValueError(f"a tile has at least one element, not {tile_numel}")
    runs: list[TileRun] = []
    members: list[int] = []
    filled = page_end = 0
    for parameter, numel in parameters:
        if numel < 0:
            raise ValueError(f"parameter {parameter} has {numel} elements")
        while numel > 0:
            whole = numel // tile_numel
            if filled == 0 and whole > 0:
                runs.append(TileRun(whole, tile_numel, align(tile_numel), (parameter,)))
                numel -= whole * tile_numel
                continue
            count = min(numel, tile_numel - filled)
            members.append(parameter)
            numel, filled, page_end = numel - count, filled + count, page_end + align(count)
            if filled == tile_numel:
                runs.append(TileRun(1, filled, page_end, tuple(members)))
                members, filled, page_end = [], 0, 0
    if members:
        runs.append(TileRun(1, filled, page_end, tuple(members)))
    return tuple(runs)


def plan_tiles(parameters: Iterable[tuple[int, int]], tile_numel: int, first_index: int = 0) -> tuple[TileLayout, ...]:
    """Cut parameters into tiles of ``tile_numel`` elements; the last may be smaller.

    Args:
        parameters: ``(parameter index, numel)`` in the order in which they are
            laid out. One without elements has no segment.
        tile_numel: elements a tile, at least 1.
        first_index: the index of the first tile.

    Raises:
        ValueError: a negative numel, or a tile size below 1.
    """
    if tile_numel < 1:
        raise ValueError(f"a tile has at least one element, not {tile_numel}")
    tiles: list[TileLayout] = []
    segments: list[SegmentLayout] = []
    filled = page_end = 0

    def close() -> None:
        nonlocal segments, filled, page_end
        tiles.append(TileLayout(first_index + len(tiles), tuple(segments), page_end))
        segments, filled, page_end = [], 0, 0

    for parameter, numel in parameters:
        if numel < 0:
            raise ValueError(f"parameter {parameter} has {numel} elements")
        offset = 0
        while offset < numel:
            count = min(numel - offset, tile_numel - filled)
            segments.append(SegmentLayout(parameter, offset, page_end, count))
            offset += count
            filled += count
            page_end += align(count)
            if filled == tile_numel:
                close()
    if segments:
        close()
    return tuple(tiles)

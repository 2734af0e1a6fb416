"""Layout of parameters in segments and tiles, as frozen dataclasses of numbers, without tensors or devices.

A tile is ``tile_numel`` consecutive elements of parameters; a segment is one parameter's range of one tile.

In a buffer, each segment begins at a multiple of :data:`SEGMENT_ALIGNMENT` elements, so that no two segments share a
cache line and streaming stores find whole lines. The gaps are never read or written, and are not counted in
``tile_numel``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from longshore.layout.formats import StateFormat

NORM_BLOCK_NUMEL = 1 << 16
"""Number of elements of a parameter whose squares are added into one sum: kPieceNumel in native/buffers.h."""
SEGMENT_ALIGNMENT = 16
"""Alignment of segments, in elements: 64 bytes of float32, or 32 bytes of bfloat16."""
SMALL_NUMEL = 1 << 15
"""Segments of fewer elements are small: gradients of less than 64 KiB in bfloat16. They come first in a buffer, one
after the other, so that one copy can take them all."""

_LEAST_TILE, _LEAST_TILE_IN_PLACE, _LARGEST_TILE = 1 << 22, 1 << 24, 1 << 25
_TILE_OF_A_THREAD = 1 << 18


def default_tile_numel(staged: bool, threads: int) -> int:
    """Return the default number of elements of a tile.

    A tile of 4 Mi elements is 8 MiB of bfloat16 and some 300 microseconds of a PCIe 4 link, long beside what a copy and
    a call cost; where nothing is copied, 16 Mi, since then a call is all that a smaller one adds. Each thread that is
    woken adds to what a call costs, and each takes its share of the tile four times (``piece_numel`` in
    ``native/step.cpp``): so from 16 threads on a tile grows with them, up to 32 Mi, of which 192 have 170 Ki each. The
    caches do not matter, as a step passes over memory once, nor do NUMA nodes, as threads take what is next.

    Args:
        staged: whether tiles are copied between a device and the host.
        threads: host threads that step.
    """
    least = _LEAST_TILE if staged else _LEAST_TILE_IN_PLACE
    wanted = 1 << (threads * _TILE_OF_A_THREAD - 1).bit_length()  # the next power of two
    return min(max(least, wanted), _LARGEST_TILE)


class DimRange(NamedTuple):
    """Range ``[start, start + numel)`` of one dimension of a tensor; the other dimensions are whole."""

    dim: int
    start: int
    numel: int

    def shape_in(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this part of a tensor whose shape is ``shape``."""
        return (*shape[: self.dim], self.numel, *shape[self.dim + 1 :])


@dataclass(frozen=True)
class SegmentLayout:
    """Elements ``[parameter_offset, parameter_offset + numel)`` of one parameter."""

    parameter: int
    parameter_offset: int
    buffer_offset: int
    numel: int

    @property
    def small(self) -> bool:
        return self.numel < SMALL_NUMEL

    @property
    def in_buffer(self) -> slice:
        """Elements of the segment in each array of a buffer."""
        return slice(self.buffer_offset, self.buffer_offset + self.numel)


@dataclass(frozen=True)
class TileLayout:
    """One tile's segments, in order of ``buffer_offset``."""

    index: int
    segments: tuple[SegmentLayout, ...]
    buffer_numel: int
    """Length of each array of the tile's buffer, gaps included."""

    @property
    def numel(self) -> int:
        return sum(segment.numel for segment in self.segments)


@dataclass(frozen=True)
class MatrixLayout:
    """Division of a parameter into the matrices that an optimizer treats as a whole.

    Attributes:
        rows, columns: of the parameter as one matrix; the dimensions before the last one are its rows.
        blocks: the matrices, each a range of rows or of columns; together they are the parameter.
    """

    rows: int
    columns: int
    blocks: tuple[DimRange, ...]

    def shape_of(self, block: DimRange) -> tuple[int, int]:
        """Return the rows and columns of one matrix."""
        return (block.numel, self.columns) if block.dim == 0 else (self.rows, block.numel)

    def parts(self, offset: int, numel: int) -> Iterator[tuple[int, int, DimRange]]:
        """Yield consecutive parts ``(begin, end, block)`` of the elements ``[offset, offset + numel)`` of the flat
        parameter; those of blocks of columns, which are all of one shape, are one part."""
        if self.blocks[0].dim == 1:
            yield offset, offset + numel, self.blocks[0]
            return
        for block in self.blocks:
            begin, end = block.start * self.columns, (block.start + block.numel) * self.columns
            if max(begin, offset) < min(end, offset + numel):
                yield max(begin, offset), min(end, offset + numel), block


def align(numel: int, unit: int = 1) -> int:
    """Round ``numel`` up to a multiple of :data:`SEGMENT_ALIGNMENT` and of ``unit``."""
    multiple = math.lcm(unit, SEGMENT_ALIGNMENT)
    return -(-numel // multiple) * multiple


class TileCount(NamedTuple):
    """Number and layout of consecutive tiles of one size."""

    tiles: int
    numel: int
    buffer_numel: int
    segments: tuple[SegmentLayout, ...]
    """Segments of the first tile; from tile to tile, their ``parameter_offset`` grows by ``numel``."""

    @property
    def parameters(self) -> tuple[int, ...]:
        """Parameters that have a segment in each of the tiles."""
        return tuple(segment.parameter for segment in self.segments)


def count_tiles(parameters: Iterable[tuple[int, int]], tile_numel: int, unit: int = 1) -> tuple[TileCount, ...]:
    """Divide parameters into tiles of ``tile_numel`` elements, without making each tile: a parameter of any size adds
    about two entries at most. The last tile may be smaller.

    Args:
        parameters: ``(parameter index, numel)`` in the order in which they are laid out. A parameter without
            elements has no segment.
        tile_numel: elements of a tile, at least 1.
        unit: number of elements at whose multiples parameters may be divided. The numbers of elements of all
            parameters, and of a tile, are then multiples too; a smaller or other tile size is rounded.

    Raises:
        ValueError: a negative numel, or a tile size below 1.
    """
    if tile_numel < 1:
        raise ValueError(f"a tile has at least one element, not {tile_numel}")
    tile_numel = max(tile_numel // unit, 1) * unit
    runs: list[TileCount] = []
    segments: list[SegmentLayout] = []
    filled = 0

    def close(tiles: int = 1) -> None:
        nonlocal filled
        placed = tuple(_placed(segments))
        runs.append(TileCount(tiles, filled, placed[-1].buffer_offset + align(placed[-1].numel), placed))
        segments.clear()
        filled = 0

    for parameter, numel in parameters:
        if numel < 0:
            raise ValueError(f"parameter {parameter} has {numel} elements")
        offset = 0
        while offset < numel:
            count = min(numel - offset, tile_numel - filled)
            tiles = (numel - offset) // tile_numel if count == tile_numel else 1
            segments.append(SegmentLayout(parameter, offset, 0, count))
            offset, filled = offset + tiles * count, filled + count
            if filled == tile_numel:
                close(tiles)
    if segments:
        close()
    return tuple(runs)


def _placed(segments: Sequence[SegmentLayout]) -> Iterator[SegmentLayout]:
    """Yield the segments of one tile, the small ones first, with their places in the buffer."""
    buffer_end = 0
    for segment in sorted(segments, key=lambda each: not each.small):
        yield replace(segment, buffer_offset=buffer_end)
        buffer_end += align(segment.numel)


class Range(NamedTuple):
    """Elements ``[offset, offset + numel)`` of one parameter."""

    parameter: int
    offset: int
    numel: int
    dtype: torch.dtype


@dataclass(frozen=True)
class TileRun:
    """Consecutive tiles of one size, of one dtype, and of one format of states."""

    count: TileCount
    dtype: torch.dtype
    format: StateFormat

    def layouts(self, first: int, offsets: Mapping[int, int]) -> Iterator[TileLayout]:
        """Yield each tile, numbered from ``first``; ``offsets``: where the range of each parameter begins."""
        count = self.count
        for number in range(count.tiles):
            segments = tuple(
                replace(each, parameter_offset=offsets[each.parameter] + each.parameter_offset + number * count.numel)
                for each in count.segments
            )
            yield TileLayout(first + number, segments, count.buffer_numel)


def tile_runs(ranges: Iterable[tuple[int, int, torch.dtype, StateFormat]], tile_numel: int) -> Iterator[TileRun]:
    """Yield the runs of tiles of ranges ``(key, numel, dtype, format)``; ranges of another dtype or format are in other
    tiles, and empty ones in none."""
    alike: dict[tuple[torch.dtype, StateFormat], list[tuple[int, int]]] = {}
    for key, numel, dtype, format in ranges:
        if numel > 0:
            alike.setdefault((dtype, format), []).append((key, numel))
    for (dtype, format), members in alike.items():
        for count in count_tiles(members, tile_numel, format.unit):
            yield TileRun(count, dtype, format)


def kept_on_device(numels: Sequence[int], ratio: float) -> list[int]:
    """Return how many first elements of each parameter stay on the device if ``ratio`` of all elements are on the host.

    The first parameters stay whole, and one may be divided at a multiple of ``NORM_BLOCK_NUMEL``.
    """
    total = sum(numels)
    left = total - round(total * ratio)
    kept_numels = []
    for numel in numels:
        kept = numel if left >= numel else left // NORM_BLOCK_NUMEL * NORM_BLOCK_NUMEL
        left = left - kept if kept == numel else 0
        kept_numels.append(kept)
    return kept_numels


def divided(parameters: Iterable[tuple[int, int, torch.dtype]], ratio: float) -> tuple[list[Range], list[Range]]:
    """Return the ranges of parameters ``(index, numel, dtype)`` that stay on the device, and the others. Warns if less
    than a quarter of what ``ratio`` leaves on the device stays there."""
    entries = list(parameters)
    numels = [numel for _, numel, _ in entries]
    kept_numels = kept_on_device(numels, ratio)
    share = sum(kept_numels) / sum(numels) if sum(numels) > 0 else 1.0
    if share < (1.0 - ratio) / 4:
        warnings.warn(
            f"ratio={ratio:g} leaves {1.0 - ratio:.0%} of the optimizer's state on the device, and {share:.0%} stays "
            f"there: the first parameters stay, and what is left is too small for a part of the next one "
            f"({NORM_BLOCK_NUMEL:,} elements or a multiple). Lower ratio, or use device='none' to keep all of it there",
            stacklevel=2,
        )
    kept: list[Range] = []
    rest: list[Range] = []
    for (index, numel, dtype), stays in zip(entries, kept_numels, strict=True):
        kept.append(Range(index, 0, stays, dtype))
        rest.append(Range(index, stays, numel - stays, dtype))
    return kept, rest


def padded_bytes(size: int) -> int:
    """Return the number of bytes that a slot of ``size`` bytes takes in its block."""
    return -(-size // 64) * 64

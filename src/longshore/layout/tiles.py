"""Layout of parameters in segments and tiles, as frozen dataclasses of numbers, without tensors or devices.

A tile is ``tile_numel`` consecutive elements of parameters; a segment is one parameter's range of one tile.

In a buffer, each segment begins at a multiple of :data:`SEGMENT_ALIGNMENT` elements, so that no two segments share a
cache line and streaming stores find whole lines. The gaps are never read or written, and are not counted in
``tile_numel``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from longshore.layout.formats import FLOAT32_STATES, Coding, StateFormat

if TYPE_CHECKING:
    import torch

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


class Home(Enum):
    """A memory in which tiles rest, and are stepped."""

    DEVICE = "device"
    """The memory of the device on which parameters compute."""
    HOST = "host"

    @classmethod
    def of(cls, offloads: bool, ratio: float, staged: bool) -> tuple[Home, ...]:
        """Return the homes of an optimizer's tiles, in the order in which these are stepped: those that take the device
        come before those that take the host. The last one has the matrices, and all that the others leave.

        Args:
            offloads: whether the state is offloaded from the parameters' device.
            ratio: the share of it that is.
            staged: whether that device has memory of its own.
        """
        if not staged:
            return (cls.HOST,)
        if not offloads:
            return (cls.DEVICE,)
        return (cls.HOST,) if ratio == 1.0 else (cls.DEVICE, cls.HOST)


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

    def whole(self, parameter: int) -> MatrixRange:
        """Return all elements of the parameter with this index."""
        return MatrixRange(parameter, self)

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


@dataclass(frozen=True)
class MatrixRange:
    """Elements of a matrix that have a key of their own in a store: all of it, or one rank's part.

    Attributes:
        parameter: index of the parameter in the optimizer.
        layout: how that parameter is divided into matrices.
        offset: first element in the parameter, flat.
    """

    parameter: int
    layout: MatrixLayout
    offset: int = 0


class Spec(NamedTuple):
    """A parameter, or a part of it, that is to be laid out.

    Attributes:
        key: number by which a store knows it: of a parameter, or of one rank's range.
        numel: number of elements.
        coding: encoding of the states, from the first element of the key on.
        matrix: for parameters whose rule treats each matrix as a whole.
        offset: first element, of all those that the key stands for.
    """

    key: int
    numel: int
    dtype: torch.dtype
    coding: Coding = FLOAT32_STATES
    matrix: MatrixRange | None = None
    offset: int = 0

    def part(self, offset: int, numel: int) -> Spec:
        """Return some elements of it, under the same key."""
        return self._replace(offset=self.offset + offset, numel=numel)

    def keyed(self, key: int, offset: int, numel: int) -> Spec:
        """Return some elements of a parameter under a key of their own."""
        matrix = None if self.matrix is None else replace(self.matrix, offset=self.matrix.offset + offset)
        return Spec(key, numel, self.dtype, self.coding.behind(offset), matrix)


class Range(NamedTuple):
    """Elements ``[offset, offset + numel)`` of one parameter, flat, that a rank steps.

    Attributes:
        key: number of the range, equal on every rank that has it, and of no other range of its rank.
        shard_offset: where it begins in the rank's shard of the bucket.
        held_offset: where it begins in the part of the parameter that the rank has where parameters compute.
        counts: whether it counts in a sum over the ranks; otherwise another rank has the same range, which counts.
        saves: whether this rank writes it to checkpoints, if several ranks step the same elements.
        within: the part of the parameter in which ``offset`` counts, if tensor parallelism divided it first.
    """

    key: int
    parameter: int
    offset: int
    numel: int
    shard_offset: int = 0
    held_offset: int = 0
    counts: bool = True
    saves: bool = True
    within: DimRange | None = None

    @property
    def elements(self) -> slice:
        """Elements of the range, of the flat parameter, or of its part ``within``."""
        return slice(self.offset, self.offset + self.numel)

    @property
    def held(self) -> slice:
        """Elements of the range, of the part of the parameter that the rank has, flat."""
        return slice(self.held_offset, self.held_offset + self.numel)


def align(numel: int, unit: int = 1) -> int:
    """Round ``numel`` up to a multiple of :data:`SEGMENT_ALIGNMENT` and of ``unit``."""
    multiple = math.lcm(unit, SEGMENT_ALIGNMENT)
    return -(-numel // multiple) * multiple


@dataclass(frozen=True)
class TileRun:
    """Consecutive tiles of one size, of one dtype, of one format of states, and in one memory."""

    tiles: int
    numel: int
    buffer_numel: int
    """Length of each array of a tile's buffer, gaps included."""
    segments: tuple[SegmentLayout, ...]
    """Segments of the first tile; from tile to tile, their ``parameter_offset`` grows by ``numel``."""
    dtype: torch.dtype
    format: StateFormat
    home: Home = Home.HOST
    of_matrix: bool = False
    """Whether they are the tiles of a matrix, which shares none with other parameters. It is stepped in two passes,
    with a transformation of the whole between them."""

    @property
    def parameters(self) -> tuple[int, ...]:
        """Parameters that have a segment in each of the tiles."""
        return tuple(segment.parameter for segment in self.segments)

    def bytes_as(self, dtype: torch.dtype) -> int:
        """Return the bytes of one array of ``dtype`` of a tile's buffer."""
        return self.buffer_numel * dtype.itemsize

    def layouts(self, first: int) -> Iterator[TileLayout]:
        """Yield each tile, numbered from ``first``."""
        for number in range(self.tiles):
            segments = tuple(
                replace(each, parameter_offset=each.parameter_offset + number * self.numel) for each in self.segments
            )
            yield TileLayout(first + number, segments, self.buffer_numel)


def tile_runs(specs: Iterable[Spec], tile_numel: int) -> Iterator[TileRun]:
    """Yield the runs of tiles of ``specs``, in which parameters of another dtype or format are in other tiles, and
    empty ones in none. No tile is made for that: a parameter of any size adds about two runs at most.

    Args:
        specs: parameters in the order in which they are laid out.
        tile_numel: elements of a tile, at least 1; the last tile of a dtype and format may be smaller. Where parameters
            may be divided at multiples of :attr:`StateFormat.unit` only, it is rounded to one.

    Raises:
        ValueError: a negative numel, or a tile size below 1.
    """
    if tile_numel < 1:
        raise ValueError(f"a tile has at least one element, not {tile_numel}")
    alike: dict[tuple[torch.dtype, StateFormat], list[Spec]] = {}
    for spec in specs:
        if spec.numel < 0:
            raise ValueError(f"parameter {spec.key} has {spec.numel} elements")
        if spec.numel > 0:
            alike.setdefault((spec.dtype, spec.coding.format), []).append(spec)
    for (dtype, format), members in alike.items():
        numel = max(tile_numel // format.unit, 1) * format.unit
        for tiles, segments in _filled(members, numel):
            placed = tuple(_placed(segments))
            buffer_numel = placed[-1].buffer_offset + align(placed[-1].numel)
            yield TileRun(tiles, sum(each.numel for each in placed), buffer_numel, placed, dtype, format)


def _filled(specs: Iterable[Spec], tile_numel: int) -> Iterator[tuple[int, list[SegmentLayout]]]:
    """Yield the number of consecutive tiles that are alike, and the segments of the first one in order."""
    segments: list[SegmentLayout] = []
    filled = 0
    for spec in specs:
        offset = 0
        while offset < spec.numel:
            count = min(spec.numel - offset, tile_numel - filled)
            tiles = (spec.numel - offset) // tile_numel if count == tile_numel else 1
            segments.append(SegmentLayout(spec.key, spec.offset + offset, 0, count))
            offset, filled = offset + tiles * count, filled + count
            if filled == tile_numel:
                yield tiles, segments
                segments, filled = [], 0
    if segments:
        yield 1, segments


def _placed(segments: Sequence[SegmentLayout]) -> Iterator[SegmentLayout]:
    """Yield the segments of one tile, the small ones first, with their places in the buffer."""
    buffer_end = 0
    for segment in sorted(segments, key=lambda each: not each.small):
        yield replace(segment, buffer_offset=buffer_end)
        buffer_end += align(segment.numel)


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


def runs_by_home(specs: Iterable[Spec], ratio: float, tile_numels: Mapping[Home, int]) -> list[TileRun]:
    """Return the tiles of parameters: those of matrices first, then those of each home.

    Args:
        specs: parameters in the order in which they are laid out.
        ratio: the share of the elements, apart from matrices, that rest in the last home. The first ones rest in the
            one before; one parameter may be divided between both.
        tile_numels: elements of a tile in each home, in the order of :meth:`Home.of`.

    Raises:
        ValueError: see :func:`tile_runs`.
    """
    entries = list(specs)
    *others, last = tile_numels
    found = [
        replace(run, home=last, of_matrix=True)
        for spec in entries if spec.matrix is not None
        for run in tile_runs([spec], tile_numels[last])
    ]  # fmt: skip
    rest = [spec for spec in entries if spec.matrix is None]
    for home in others:
        kept = list(zip(rest, kept_on_device([spec.numel for spec in rest], ratio), strict=True))
        stay = [spec.part(0, numel) for spec, numel in kept]
        found += [replace(run, home=home) for run in tile_runs(stay, tile_numels[home])]
        rest = [spec.part(numel, spec.numel - numel) for spec, numel in kept]
    return found + [replace(run, home=last) for run in tile_runs(rest, tile_numels[last])]


def padded_bytes(size: int) -> int:
    """Return the number of bytes that a slot of ``size`` bytes takes in its block."""
    return -(-size // 64) * 64

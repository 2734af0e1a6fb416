"""Boxes of tensors: ranges of elements in memory order, as offsets and sizes in the dimensions of the tensor."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

from longshore.layout.tiles import DimRange


class Box(NamedTuple):
    """Elements ``[offsets[d], offsets[d] + sizes[d])`` of each dimension ``d``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box that is all of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def common(self, other: Box) -> Box | None:
        """Return the box of the elements that both boxes have; None if there are none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = [min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True)]
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def slices_in(self, larger: Box) -> tuple[slice, ...]:
        """Return the indices of this box in the values of a box that contains it."""
        starts = [start - first for start, first in zip(self.offsets, larger.offsets, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))


def boxes_of_range(shape: Sequence[int], start: int, numel: int) -> list[Box]:
    """Return elements ``[start, start + numel)`` of a tensor in memory order, as the fewest consecutive boxes.

    There are at most ``2 * len(shape) - 1`` boxes, each contiguous in the tensor; none if ``numel`` is 0.

    Raises:
        ValueError: the tensor does not have these elements.
    """
    total = math.prod(shape)
    if start < 0 or numel < 0 or start + numel > total:
        raise ValueError(f"a tensor of shape {list(shape)} has no elements [{start}, {start + numel})")
    if numel == 0:
        return []
    if numel == total:
        return [Box.whole(shape)]
    inner_shape = shape[1:]
    inner = math.prod(inner_shape)
    row, head = divmod(start, inner)
    end_row, tail = divmod(start + numel, inner)
    if row == end_row or (row + 1 == end_row and tail == 0 and head):
        return _in_row(row, boxes_of_range(inner_shape, head, numel))
    boxes = []
    if head:
        boxes += _in_row(row, boxes_of_range(inner_shape, head, inner - head))
        row += 1
    if row < end_row:
        boxes.append(Box((row, *(0,) * len(inner_shape)), (end_row - row, *inner_shape)))
    if tail:
        boxes += _in_row(end_row, boxes_of_range(inner_shape, 0, tail))
    return boxes


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in boxes]


def boxes_in(shape: tuple[int, ...], within: DimRange | None, start: int, numel: int) -> list[Box]:
    """Convert a range of elements, in memory order, of a tensor or of its slice ``within`` to boxes of the tensor."""
    if within is None:
        return boxes_of_range(shape, start, numel)
    first = [within.start if dim == within.dim else 0 for dim in range(len(shape))]
    return [
        Box(tuple(map(operator.add, first, box.offsets)), box.sizes)
        for box in boxes_of_range(within.shape_in(shape), start, numel)
    ]

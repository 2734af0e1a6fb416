"""Parts of a tensor as boxes, the geometry in which checkpoints are written: pure numbers.

A rank's part of a parameter's state is often a run of its elements in memory order. A box has offsets and sizes in
the dimensions of the tensor, so that whoever cuts the tensor in another way can tell what of it he needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """Elements ``[offsets[d], offsets[d] + sizes[d])`` of each dimension ``d``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def moved(self, dim: int, by: int) -> Box:
        """The same box of a tensor of which the former was cut out along ``dim``, from ``by`` on."""
        return Box((*self.offsets[:dim], self.offsets[dim] + by, *self.offsets[dim + 1 :]), self.sizes)


def boxes_of_run(shape: Sequence[int], start: int, numel: int) -> list[Box]:
    """Elements ``[start, start + numel)`` of a tensor in memory order, as the fewest boxes that follow each other.

    At most ``2 * len(shape) - 1``; each is contiguous in the tensor. ``numel`` 0: none.

    Raises:
        ValueError: a run that the tensor does not have.
    """
    total = math.prod(shape)
    if start < 0 or numel < 0 or start + numel > total:
        raise ValueError(f"a tensor of shape {list(shape)} has no elements [{start}, {start + numel})")
    if numel == 0:
        return []
    if numel == total:
        return [Box((0,) * len(shape), tuple(shape))]
    inner_shape = shape[1:]
    inner = math.prod(inner_shape)
    row, head = divmod(start, inner)
    end_row, tail = divmod(start + numel, inner)
    if row == end_row or (row + 1 == end_row and tail == 0 and head):
        return _in_row(row, boxes_of_run(inner_shape, head, numel))
    boxes = []
    if head:
        boxes += _in_row(row, boxes_of_run(inner_shape, head, inner - head))
        row += 1
    if row < end_row:
        boxes.append(Box((row, *(0,) * len(inner_shape)), (end_row - row, *inner_shape)))
    if tail:
        boxes += _in_row(end_row, boxes_of_run(inner_shape, 0, tail))
    return boxes


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in boxes]

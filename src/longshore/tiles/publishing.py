"""Publishing: the copies of new parameters from one tier's memory to the parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longshore.tiles.events import PUBLISH
from longshore.tiles.memory import Slot
from longshore.tiles.parcels import runs_of_neighbors
from longshore.tiles.tile import Segment, Tile
from longshore.transfer import Bundle, Copy, CopyStreams


class NewValues(NamedTuple):
    """New values of a segment, and the part of the parameter that they belong to."""

    segment: Segment
    output: Tensor
    target: Tensor


def publish(streams: CopyStreams, tile: Tile, slot: Slot | None, new: Sequence[NewValues]) -> None:
    """Copy new values of a tile to its parameters: those of small neighbors together.

    Args:
        slot: where the new values are, in order; None: they are in no slot.
        new: in the order of the tile's buffer.
    """
    together = streams.publishes and slot is not None
    small = [each for each in new if together and each.segment.layout.small]
    alone = [[each] for each in new if not (together and each.segment.layout.small)]
    for run in [*runs_of_neighbors(small, lambda each: each.segment.place), *alone]:
        handle = _publish_run(streams, tile, slot, run)
        if slot is not None:
            slot.last_publish = handle


def _publish_run(streams: CopyStreams, tile: Tile, slot: Slot | None, run: Sequence[NewValues]) -> Copy:
    begin_ns = tile.recorder.begin(PUBLISH, tile.layout.index)
    handle: Copy | None = None
    if slot is not None and len(run) > 1:
        whole, offsets = slot.view_of_run(tile.dtype, [each.segment.layout for each in run])
        targets = Bundle([(each.target, offset) for each, offset in zip(run, offsets, strict=True)])
        with contextlib.suppress(torch.OutOfMemoryError):  # of the memory that they pass through
            handle = streams.publish(whole, targets)
    if handle is None:
        for each in run:
            handle = streams.publish(each.output, each.target)
    assert handle is not None
    tile.recorder.copying(PUBLISH, tile.layout.index, handle, begin_ns)
    return handle

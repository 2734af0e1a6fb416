"""One commit's way through the tiles: down, stepped, up, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from longshore.host.memory import SlotRing
from longshore.host.recorder import PUBLISH
from longshore.host.schedule import PIPELINE_DEPTH, Move, commit_moves
from longshore.host.snapshot import Snapshots
from longshore.host.speculator import Speculator
from longshore.host.stepping import ParameterStep, SegmentStep, commit_tile
from longshore.host.tile import Segment, Tile
from longshore.kernels import Kernels, Scale
from longshore.transfer import CopyHandle, Transfer

Work = tuple[Tile, list[tuple[Segment, ParameterStep]]]
"""A tile, and those of its segments that have a gradient."""


class Pipeline:
    """Steps tiles and publishes them.

    What was stepped ahead is taken first: its copies to the device run while
    the others are stepped.

    Args:
        transfer: how bytes move.
        kernels: what steps.
        ring: slots for gradients and outputs that have none of their own.
        hold_gradients: every tile has a slot of its own for its gradients.
        arrive: brings a gradient of a tile's segment down, from a point of the current stream.
        speculator: what was stepped ahead.
        snapshots: of the tiles' pages.
    """

    def __init__(
        self,
        transfer: Transfer,
        kernels: Kernels,
        ring: SlotRing,
        hold_gradients: bool,
        arrive: Callable[[Tile, Segment, Tensor, Any], None],
        speculator: Speculator,
        snapshots: Snapshots,
    ) -> None:
        self._transfer = transfer
        self._kernels = kernels
        self._ring = ring
        self._hold_gradients = hold_gradients
        self._arrive = arrive
        self._speculator = speculator
        self._snapshots = snapshots
        self.stepped: list[Tile] = []
        """Tiles that are COMMITTED, and on their way to the device."""

    def run(self, work: Sequence[Work], scale: Scale) -> None:
        """Step and publish all of it; on return the current stream sees the new parameters."""
        ready = self._transfer.mark()
        self._transfer.begin_publish()
        remaining = [(tile, active) for tile, active in work if not self._take_stepped(tile, active, scale)]
        for move, place in commit_moves(len(remaining), PIPELINE_DEPTH):
            tile, active = remaining[place]
            if move is Move.FINISH:
                self._finish(tile, active, scale)
                continue
            if self._transfer.staged and not self._hold_gradients:
                tile.slot = self._ring.next()
            self._fill(tile, active, ready)
        self._transfer.end_publish()

    def _take_stepped(self, tile: Tile, active: list[tuple[Segment, ParameterStep]], scale: Scale) -> bool:
        slot = self._speculator.verdict(tile, active, scale)
        if slot is None:
            return False
        self.stepped.append(tile)  # its page is the new one: from here on there is no way back
        for segment, step in active:
            output = slot.view(tile.dtype, segment.layout.page_offset, segment.layout.numel)
            slot.last_publish = self._publish(tile, output, segment.part_of(step.target))
        return True

    def _publish(self, tile: Tile, output: Tensor, target: Tensor) -> CopyHandle:
        begin_ns = tile.recorder.begin(PUBLISH, tile.layout.index)
        handle = self._transfer.copy_to_device(output, target)
        tile.recorder.copying(PUBLISH, tile.layout.index, handle, begin_ns)
        return handle

    def _fill(self, tile: Tile, active: list[tuple[Segment, ParameterStep]], ready: Any) -> None:
        active.sort(key=lambda pair: pair[0].layout.page_offset)
        for segment, step in active:
            if step.gradient is not None:
                assert segment.arrivals == 0  # a second one would still be on its way to the worker
                self._arrive(tile, segment, segment.part_of(step.gradient), ready)

    def _finish(self, tile: Tile, active: list[tuple[Segment, ParameterStep]], scale: Scale) -> None:
        targets, segment_steps = [], []
        if self._transfer.staged and not tile.outputs_fit:
            tile.output_slot = self._ring.next()
            if tile.output_slot.last_publish is not None:
                tile.output_slot.last_publish.wait()  # the kernel writes at once, on no lane
        for segment, step in active:
            target = segment.part_of(step.target)
            targets.append(target)
            output = self._transfer.output_for(target, tile.output_view(segment.layout))
            segment_steps.append(SegmentStep(segment, step.rule, output))
        with self._snapshots.page_for(tile) as into:
            commit_tile(tile, segment_steps, scale, self._kernels, into)
        self.stepped.append(tile)
        for segment_step, target in zip(segment_steps, targets, strict=True):
            handle = self._publish(tile, segment_step.output, target)
            slot = tile.output_slot or tile.slot
            if slot is not None:
                slot.last_publish = handle
        tile.output_slot = None

"""Steps of the tiles of one tier by its own kernels, where they rest: several are under way at a time."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from longshore.accelerator import Mark
from longshore.kernels import Buffer, Kernels, Outputs, Scale, copy_elements, master_of
from longshore.layout.memory import PIPELINE_DEPTH
from longshore.tiles.events import Move, commit_moves
from longshore.tiles.matrices import MatrixSteps
from longshore.tiles.matrix_exchange import MatrixExchange
from longshore.tiles.memory import Slot
from longshore.tiles.tier import Active, NewValues, Tier
from longshore.tiles.tile import SegmentStep, Tile, TileEvent, TileState, step_table
from longshore.transfer import wait_for_all


class InPlace:
    """The steps of one commit in one tier.

    Args:
        work: the tiles to step.
        scale: of the gradients.
        stepped: tiles that are COMMITTED, and on their way to the device, are appended.
        exchange: brings together the matrices of which several ranks have a part; None: this rank has all of each.
    """

    def __init__(
        self,
        tier: Tier,
        work: Sequence[tuple[Tile, Active]],
        scale: Scale,
        stepped: list[Tile],
        exchange: MatrixExchange | None = None,
    ) -> None:
        self._tier = tier
        self._matrices = [entry for entry in work if entry[0].arrays.of_matrices]
        self._others = work if not self._matrices else [entry for entry in work if not entry[0].arrays.of_matrices]
        self._scale = scale
        self._stepped = stepped
        self._exchange = exchange

    def run_matrices(self) -> None:
        """Step and publish matrices, in all tiers before anything else: they are transformed where parameters compute,
        for which there may be no memory."""
        if not self._matrices and self._exchange is None:
            return
        exchange = self._exchange or self._tier.exchange
        ready = self._begin()
        MatrixSteps(self._tier, exchange, self._scale, self._stepped, ready).run(self._matrices)
        self._tier.streams.end_publish()

    def run(self) -> None:
        """Step and publish the other tiles; then the current stream sees the new parameters.

        Tiles that were stepped ahead come first: their copies to the device run while the others are stepped.
        """
        ready = self._begin()
        remaining = [entry for entry in self._others if not self._take_stepped(*entry)]
        for move, place in commit_moves(len(remaining), PIPELINE_DEPTH):
            if move is Move.FILL:
                self._tier.fill(*remaining[place], ready)
            else:
                self._finish(*remaining[place])
        self._tier.streams.end_publish()

    def _begin(self) -> Sequence[Mark]:
        """Begin to publish; return when the gradients that the commit has are there."""
        if self._tier.snapshots.active:
            self._tier.snapshots.collect()
        self._tier.streams.begin_publish()
        return self._tier.streams.mark()

    def _take_stepped(self, tile: Tile, active: Active) -> bool:
        compared = tile.outputs is Outputs.COMPARED and tile.state is TileState.STEPPED
        written = compared and self._written(tile, active)
        slot = self._tier.speculator.verdict(tile, active, self._scale, written)
        if slot is None:
            return False
        self._tier.speculator.keep(tile)
        self._stepped.append(tile)  # its buffer is the new one: from here on there is no way back
        views = [slot.view(tile.dtype, segment.layout) for segment, _ in active]
        self._publish(tile, slot, active, views)
        return True

    def _written(self, tile: Tile, active: Active) -> bool:
        """Return whether a parameter of a tile that was stepped ahead, from its old master, was written since."""
        assert tile.buffer is not None
        master, reconcile = master_of(tile.buffer), self._tier.kernels.reconcile
        return any(
            reconcile(master[segment.layout.in_buffer], segment.part_of(step.target), adopt=False) > 0
            for segment, step in active
        )

    def _publish(self, tile: Tile, slot: Slot | None, active: Active, outputs: Sequence[Tensor]) -> None:
        pairs = zip(active, outputs, strict=True)
        new = [NewValues(segment, output, segment.part_of(step.target)) for (segment, step), output in pairs]
        self._tier.publish(tile, slot, new)

    def _finish(self, tile: Tile, active: Active) -> None:
        segment_steps = []
        slot = self._tier.output_slot(tile)
        for segment, step in active:
            staged = None if slot is None else slot.view(tile.dtype, segment.layout)
            output = self._tier.streams.output_for(segment.part_of(step.target), staged)
            segment_steps.append(SegmentStep(segment, step.rule, output))
        if self._tier.snapshots.active:
            with self._tier.snapshots.buffer_for(tile) as into:
                commit_tile(tile, segment_steps, self._scale, self._tier.kernels, into)
        else:
            commit_tile(tile, segment_steps, self._scale, self._tier.kernels)
        self._stepped.append(tile)
        self._publish(tile, slot, active, [step.output for step in segment_steps])


def commit_tile(
    tile: Tile,
    steps: Sequence[SegmentStep],
    scale: Scale,
    kernels: Kernels,
    into: Buffer | None = None,
) -> None:
    """Write a tile's new values to its buffer and the outputs (FILLING or READY -> COMMITTED; BROKEN if that fails).

    If ``into`` is given, it becomes the tile's buffer, and the old buffer is only read; else the step is in place.
    """
    wait_for_all(step.segment.handle for step in steps if step.segment.handle is not None)
    rows, rules = step_table(steps, [step.segment.gradient for step in steps])
    buffer = tile.buffer
    assert buffer is not None
    target = buffer if into is None else into
    tile.move(TileEvent.COMMIT)
    with tile.stepping(target, rows):
        if into is not None:
            for part in tile.idle_parts(steps):  # elements that are not stepped keep their values
                copy_elements(into, buffer, part)
        kernels.step_tile(buffer, target, rows, rules, scale, tile.outputs)
    tile.buffer = target
    tile.move(TileEvent.COMMIT_DONE)

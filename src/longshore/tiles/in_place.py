"""Steps of the tiles of one tier by its own kernels, where they rest: several are under way at a time.

The step of a parameter whose rule treats each matrix as a whole, such as Muon's, has two passes over the tiles of the
matrix, and a transformation of the whole matrix between them. The first pass writes the new momentum and, in bfloat16,
the matrix to be transformed; the last pass has the result as its gradient. A matrix has tiles of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longshore.accelerator import Mark
from longshore.kernels import (
    MATRIX_MASTER,
    MATRIX_STATE,
    UNSCALED,
    Buffer,
    Kernels,
    MatrixRule,
    Outputs,
    Rule,
    Scale,
    TileSegment,
    copy_elements,
    float32_arrays,
    master_of,
)
from longshore.tiles.events import Move, commit_moves
from longshore.tiles.matrix_exchange import MATRICES_UNDER_WAY, Matrix, MatrixExchange
from longshore.tiles.memory import Slot
from longshore.tiles.tier import Active, NewValues, Tier
from longshore.tiles.tile import ParameterStep, Segment, SegmentStep, Tile, TileEvent, TileState, step_table
from longshore.transfer import wait_for_all


class _Part(NamedTuple):
    """The part of a matrix that is in one tile, and of which ``begin`` is the first element in this process's piece.

    ``ahead``: the part to be transformed, if the tile was stepped ahead."""

    tile: Tile
    segment: Segment
    step: ParameterStep
    begin: int
    ahead: Tensor | None

    @property
    def in_piece(self) -> slice:
        return slice(self.begin, self.begin + self.segment.layout.numel)


@dataclass
class _Work:
    """A matrix that is to be stepped, and the parts of it that are here, in order."""

    matrix: Matrix
    parts: list[_Part] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return sum(part.segment.layout.numel for part in self.parts)


class MatrixSteps:
    """The steps of the matrices of one commit.

    Args:
        tier: keeps the tiles.
        exchange: brings whole matrices together, and transforms them.
        stepped: tiles that are COMMITTED are appended.
        ready: when gradients that the commit has are there.
    """

    def __init__(
        self, tier: Tier, exchange: MatrixExchange, scale: Scale, stepped: list[Tile], ready: Sequence[Mark]
    ) -> None:
        self._tier = tier
        self._exchange = exchange
        self._scale = scale
        self._stepped = stepped
        self._ready = ready

    def run(self, work: Sequence[tuple[Tile, Active]]) -> None:
        """Step and publish these tiles. If other ranks have parts of matrices, this one may have none."""
        found = self._by_matrix(work)
        batches = self._exchange.batches({parameter: each.matrix for parameter, each in found.items()})
        here = [[found[each.parameter] for each in batch if each.parameter in found] for batch in batches]
        memory = self._tier.matrix_memory
        memory.reserve(max((sum(each.numel for each in works) for works in here), default=0))
        self._exchange.reserve(batches)
        under_way: dict[int, Any] = {}
        for move, place in commit_moves(len(batches), MATRICES_UNDER_WAY):
            if move is Move.FILL:
                pieces = self._first_passes(here[place], memory.of_batch(place))
                under_way[place] = self._exchange.begin(batches[place], pieces)
            else:
                updates = self._exchange.finish(under_way.pop(place))
                for each in here[place]:
                    self._last_passes(each, updates[each.matrix.parameter])

    def _by_matrix(self, work: Sequence[tuple[Tile, Active]]) -> dict[int, _Work]:
        """Return the work by parameter; both the matrices and the parts of each are in order."""
        ranges, speculator = self._tier.ranges, self._tier.speculator
        entries = [(ranges[segment.layout.parameter], tile, segment, step) for tile, [(segment, step)] in work]
        entries.sort(key=lambda entry: (entry[0].parameter, entry[0].offset, entry[2].layout.parameter_offset))
        found: dict[int, _Work] = {}
        for where, tile, segment, step in entries:
            assert isinstance(step.rule, MatrixRule)
            each = found.setdefault(where.parameter, _Work(Matrix(where.parameter, where.layout, step.rule)))
            # The last pass reads what somebody wrote to the parameters.
            slot = speculator.verdict(tile, [(segment, step)], self._scale, written=False)
            ahead = None if slot is None else slot.view(torch.bfloat16, segment.layout)
            each.parts.append(_Part(tile, segment, step, each.numel, ahead))
        return found

    def _first_passes(self, works: Sequence[_Work], memory: Tensor) -> Mapping[int, Tensor]:
        """Write the new states, and return this process's piece of each matrix that is to be transformed, in
        ``memory``."""
        pieces = dict(
            zip(
                (work.matrix.parameter for work in works),
                memory[: sum(work.numel for work in works)].split([work.numel for work in works]),
                strict=True,
            )
        )
        for work in works:
            for part in work.parts:
                if part.ahead is not None and len(work.parts) == 1:
                    self._tier.speculator.spend(part.tile)  # the transformation writes it
                    pieces[work.matrix.parameter] = part.ahead
                elif part.ahead is not None:
                    pieces[work.matrix.parameter][part.in_piece] = part.ahead
        todo = [(work.matrix, part) for work in works for part in work.parts if part.ahead is None]
        for move, place in commit_moves(len(todo)):
            matrix, part = todo[place]
            if move is Move.FILL:
                self._tier.fill(part.tile, [(part.segment, part.step)], self._ready)
            else:
                self._first_pass(part, matrix.rule.first, pieces[matrix.parameter][part.in_piece])
        return pieces

    def _first_pass(self, part: _Part, rule: Rule, output: Tensor) -> None:
        tile, segment = part.tile, part.segment
        wait_for_all([] if segment.handle is None else [segment.handle])
        self._tier.snapshots.make_writable(tile)
        assert tile.buffer is not None
        tile.move(TileEvent.COMMIT)
        row = TileSegment(segment.layout.buffer_offset, segment.held(), output, 0)
        state = float32_arrays(tile.buffer)[MATRIX_STATE]
        with tile.stepping(state, [row]):
            self._tier.kernels.step_tile(state, state, [row], [rule], self._scale, Outputs.WRITTEN)

    def _last_passes(self, work: _Work, update: Tensor) -> None:
        """Step the masters by the transformed matrix, of which ``update`` is this process's piece, and publish them."""
        tier, layout = self._tier, work.matrix.layout
        rules = [work.matrix.rule.last(*layout.shape_of(block)) for block in layout.blocks]
        for part in work.parts:
            tile, segment, target = part.tile, part.segment, part.segment.part_of(part.step.target)
            slot = tier.output_slot(tile, own=tier.hold_gradients)
            staged = None if slot is None else slot.view(tile.dtype, segment.layout)
            output, gradient = tier.streams.output_for(target, staged), update[part.in_piece]
            offset = tier.ranges[segment.layout.parameter].offset + segment.layout.parameter_offset
            rows = []
            for begin, end, block in layout.parts(offset, segment.layout.numel):
                here = slice(begin - offset, end - offset)
                at = segment.layout.buffer_offset + here.start
                rows.append(TileSegment(at, gradient[here], output[here], layout.blocks.index(block)))
            assert tile.buffer is not None
            before = float32_arrays(tile.buffer)[MATRIX_MASTER]
            if part.ahead is not None:
                tier.speculator.keep(tile)  # before the pass, which may fail half way
            after = float32_arrays(tile.buffer)[MATRIX_MASTER]
            with tile.stepping(after, rows):
                tier.kernels.step_tile(before, after, rows, rules, UNSCALED, tile.outputs)
            if part.ahead is None:
                tile.move(TileEvent.COMMIT_DONE)
            self._stepped.append(tile)
            tier.publish(tile, slot, [NewValues(segment, output, target)])


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
        for move, place in commit_moves(len(remaining)):
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

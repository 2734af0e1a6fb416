"""Backend of matrices: parameters whose rule treats each matrix as a whole, such as Muon's.

A step has two passes over the tiles of a matrix, and a transformation of the whole matrix between them. The first pass
writes the new momentum and, in bfloat16, what is to be transformed; the last pass has the result as its gradient. A
matrix has tiles of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from longshore.kernels import UNSCALED, HostRule, MatrixRule, Outputs, Rule, Scale, TileSegment, float32_arrays
from longshore.layout.memory import PIPELINE_DEPTH
from longshore.layout.tiles import MatrixRange
from longshore.tiles.backend import Active, Backend, BackendSettings
from longshore.tiles.events import STEP_IN_PLACE, Move, Recorder, commit_moves
from longshore.tiles.matrix_exchange import MATRICES_UNDER_WAY, LocalExchange, Matrix, MatrixExchange
from longshore.tiles.memory import PendingReads, Slot
from longshore.tiles.publishing import NewValues, publish
from longshore.tiles.speculation import Speculator
from longshore.tiles.steps import MASTER
from longshore.tiles.tile import Segment, Tile, TileEvent, TileState
from longshore.transfer import wait_for_all


class MatrixSpeculator(Speculator):
    """Stepping ahead of matrices, up to what is to be transformed: that is all of a step that the host alone does.

    A transformation ahead would take memory and time of a device that needs both for backward, and would meet other
    ranks. The transformation and the last pass follow the verdict.
    """

    arrays: ClassVar = slice(1, None)
    output_dtype: ClassVar = torch.bfloat16

    @staticmethod
    def part_of(rule: HostRule) -> HostRule:
        assert isinstance(rule, MatrixRule)
        return rule.first


class _Part(NamedTuple):
    """The part of a matrix that is in one tile, and of which ``begin`` is the first element in this process's piece.

    ``ahead``: what is to be transformed of it, if its tile was stepped ahead."""

    tile: Tile
    segment: Segment
    begin: int
    target: Tensor
    gradient: Tensor | None
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


class MatrixBackend(Backend):
    """The matrices of one store.

    Args:
        settings: settings of the store.
        pending_reads: the store's buffers that a snapshot has still to read.
        state: name of the one state.
    """

    speculates: ClassVar = MatrixSpeculator

    def __init__(self, settings: BackendSettings, pending_reads: PendingReads, state: str) -> None:
        super().__init__(settings, (MASTER, state), pending_reads)
        self.ranges: dict[int, MatrixRange] = {}
        """By index in the store."""
        self.own_exchange = LocalExchange(settings.streams)
        self.exchange: MatrixExchange = self.own_exchange
        """Brings whole matrices together; of one commit, if ranks share them."""
        self._staging: list[Tensor] = []
        """Memory for the pieces of the matrices under way, flat bfloat16."""

    def state_bytes(self) -> dict[str, int]:
        counted = super().state_bytes()
        counted["staging"] += sum(each.nbytes for each in self._staging)
        return counted

    def set_recorders(self, recorders: Sequence[Recorder]) -> Recorder:
        self.own_exchange.recorder = super().set_recorders(recorders)
        return self.own_exchange.recorder

    def run(self, work: Sequence[tuple[Tile, Active]], scale: Scale, stepped: list[Tile]) -> None:
        if self.snapshots.active:
            self.snapshots.collect()
        found = self._by_matrix(work, scale)
        batches = self.exchange.batches({parameter: each.matrix for parameter, each in found.items()})
        here = [[found[each.parameter] for each in batch if each.parameter in found] for batch in batches]
        self._reserve(max((sum(each.numel for each in works) for works in here), default=0))
        self.exchange.reserve(batches)
        self.streams.begin_publish()
        under_way: dict[int, Any] = {}
        for move, place in commit_moves(len(batches), MATRICES_UNDER_WAY):
            if move is Move.FILL:
                memory = self._staging[place % MATRICES_UNDER_WAY]
                pieces = self._first_passes(here[place], memory, scale)
                under_way[place] = self.exchange.begin(batches[place], pieces)
            else:
                updates = self.exchange.finish(under_way.pop(place))
                for each in here[place]:
                    self._last_passes(each, updates[each.matrix.parameter], stepped)
        self.streams.end_publish()

    # -- the parts of a step --------------------------------------------------

    def _by_matrix(self, work: Sequence[tuple[Tile, Active]], scale: Scale) -> dict[int, _Work]:
        """Return the work by parameter; both the matrices and the parts of each are in order."""
        entries = [(self.ranges[segment.layout.parameter], tile, segment, step) for tile, [(segment, step)] in work]
        entries.sort(key=lambda entry: (entry[0].parameter, entry[0].offset, entry[2].layout.parameter_offset))
        found: dict[int, _Work] = {}
        for where, tile, segment, step in entries:
            assert isinstance(step.rule, MatrixRule)
            each = found.setdefault(where.parameter, _Work(Matrix(where.parameter, where.layout, step.rule)))
            gradient = None if step.gradient is None else segment.part_of(step.gradient)
            slot = self.speculator.verdict(tile, [(segment, step)], scale, written=False)  # the last pass reads those
            ahead = None if slot is None else slot.view(torch.bfloat16, segment.layout)
            each.parts.append(_Part(tile, segment, each.numel, segment.part_of(step.target), gradient, ahead))
        return found

    def _reserve(self, numel: int) -> None:
        """Make sure that there is memory for the pieces of as many batches as are under way."""
        if not self._staging or self._staging[0].numel() < numel:
            self._staging = []
            memory = [self.streams.allocate(2 * numel) for _ in range(MATRICES_UNDER_WAY)]
            self._staging = [each[: 2 * numel].view(torch.bfloat16) for each in memory]

    def _first_passes(self, works: Sequence[_Work], memory: Tensor, scale: Scale) -> Mapping[int, Tensor]:
        """Write the new states, and return what is to be transformed, in ``memory``: this process's piece of each
        matrix, flat bfloat16."""
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
                    self.speculator.spend(part.tile)  # the transformation writes it
                    pieces[work.matrix.parameter] = part.ahead
                elif part.ahead is not None:
                    pieces[work.matrix.parameter][part.in_piece] = part.ahead
        todo = [(work.matrix, part) for work in works for part in work.parts if part.ahead is None]
        ready = self.streams.mark()
        for move, place in commit_moves(len(todo), PIPELINE_DEPTH):
            matrix, part = todo[place]
            if move is Move.FINISH:
                self._first_pass(part, matrix.rule.first, pieces[matrix.parameter][part.in_piece], scale)
                continue
            if self.streams.staged and not self._hold_gradients:
                part.tile.slot = self._ring.next()
            if part.gradient is not None:
                self.bring(part.tile, part.segment, part.gradient, ready)
            if part.tile.parcel is not None:
                part.tile.parcel.begin()
        return pieces

    def _first_pass(self, part: _Part, rule: Rule, output: Tensor, scale: Scale) -> None:
        tile, segment = part.tile, part.segment
        wait_for_all([] if segment.handle is None else [segment.handle])
        self.snapshots.make_writable(tile)
        assert tile.buffer is not None and segment.gradient is not None
        tile.move(TileEvent.COMMIT)
        row = TileSegment(segment.layout.buffer_offset, segment.gradient, output, 0)
        state = float32_arrays(tile.buffer)[-1:]
        self._pass(tile, state, state, [row], [rule], scale, Outputs.WRITTEN)

    def _last_passes(self, work: _Work, update: Tensor, stepped: list[Tile]) -> None:
        """Step the masters by the transformed matrix, of which ``update`` is this process's piece, and publish them."""
        layout = work.matrix.layout
        rules = [work.matrix.rule.last(*layout.shape_of(block)) for block in layout.blocks]
        for part in work.parts:
            tile, segment = part.tile, part.segment
            slot = self._output_slot(tile)
            staged = None if slot is None else slot.view(tile.dtype, segment.layout)
            output, gradient = self.streams.output_for(part.target, staged), update[part.in_piece]
            offset = self.ranges[segment.layout.parameter].offset + segment.layout.parameter_offset
            rows = []
            for begin, end, block in layout.parts(offset, segment.layout.numel):
                here = slice(begin - offset, end - offset)
                at = segment.layout.buffer_offset + here.start
                rows.append(TileSegment(at, gradient[here], output[here], layout.blocks.index(block)))
            assert tile.buffer is not None
            master = float32_arrays(tile.buffer)[:-1]
            if part.ahead is None:
                self._pass(tile, master, master, rows, rules, UNSCALED, tile.outputs)
                tile.move(TileEvent.COMMIT_DONE)
            else:
                self.speculator.keep(tile)  # before the pass, which may fail half way
                self._pass(tile, master, float32_arrays(tile.buffer)[:-1], rows, rules, UNSCALED, tile.outputs)
            stepped.append(tile)
            publish(self.streams, tile, slot, [NewValues(segment, output, part.target)])

    def _pass(
        self,
        tile: Tile,
        source: Tensor,
        target: Tensor,
        rows: Sequence[TileSegment],
        rules: Sequence[Rule],
        scale: Scale,
        outputs: Outputs,
    ) -> None:
        """Step one array of a tile's buffer, in place or into its new buffer."""
        begin_ns = tile.recorder.begin(STEP_IN_PLACE, tile.layout.index)
        try:
            self.kernels.step_tile(source, target, rows, rules, scale, outputs)
        except BaseException:
            if tile.state is TileState.COMMITTING:
                tile.move(TileEvent.COMMIT_FAILED)
            raise
        finally:
            tile.recorder.passed(STEP_IN_PLACE, tile.layout.index, target, rows, begin_ns)

    def _output_slot(self, tile: Tile) -> Slot | None:
        """Return the slot for a tile's new parameters, once nothing reads it any more."""
        if not self.streams.publishes:
            return tile.slot
        slot = tile.slot if self._hold_gradients and tile.outputs_fit else self._ring.next()
        if slot is not None and slot.last_publish is not None:
            slot.last_publish.wait()  # the kernel writes at once, on no stream
        return slot

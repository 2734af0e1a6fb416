"""Stepping tiles while backward still runs, on the bet that neither gradients nor scale will change.

A pass reads the tile's buffer and gradients and writes a spare buffer and spare outputs. At the verdict the spare
becomes the tile's, or is dropped: undoing a step restores bytes because nothing was ever overwritten (law 5).

Passes run on the worker, behind the additions that were queued before them. The worker never moves a tile: the threads
that bring gradients and the caller do, in :meth:`Speculator.harvest` for passes that have ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from longshore.byte_sizes import parse_memory_budget
from longshore.kernels import HostRule, Kernels, Scale
from longshore.tiles.early_norms import Due, EarlyNorms
from longshore.tiles.events import DROPPED, KEPT, REDONE, STEP_AHEAD
from longshore.tiles.memory import BufferPool, Slot, available_bytes, cut_slots
from longshore.tiles.steps import Forecast, ParameterStep
from longshore.tiles.tile import Segment, SegmentStep, Tile, TileEvent, TileState, step_table
from longshore.tiles.worker import JobRunner
from longshore.transfer import Transfer

SpeculationMemory = int | str
"""What :func:`longshore.byte_sizes.parse_memory_budget` takes; 100 % is the memory of a spare for every tile."""

_AUTO_PART = 4
_MEMORY = 0.75
"""Weight of all earlier verdicts against the last one: some four windows count."""
_ENOUGH = 0.5


def memory_for_speculation() -> int:
    """What ``"auto"`` grants at most to all processes of this machine together, in bytes."""
    return available_bytes() // _AUTO_PART


def speculation_budget(memory: SpeculationMemory, most: int) -> int:
    """Bytes for spares, where a spare for every tile would take ``most``."""
    budget = parse_memory_budget(memory)
    if budget.byte_count is not None:
        return budget.byte_count
    return min(most, memory_for_speculation()) if budget.share is None else int(most * budget.share)


class SpeculationRecord(NamedTuple):
    """What speculation did in the last window, by tiles, and how it stands."""

    score: float
    """How often the assumed verdict was the true one lately, from 0 to 1."""
    bets: bool
    """Whether the next window is bet on."""
    spares: int
    """Tiles that can be stepped ahead at once."""
    begun: int = 0
    kept: int = 0
    redone: int = 0
    """Stepped ahead, and again with the true scale or rule."""
    dropped: int = 0
    """Stepped ahead for nothing: one more gradient came, or the window was discarded."""
    waited: int = 0
    """Complete, but no spare was left."""


class Predictor:
    """Bets while the last verdicts were mostly the assumed one.

    It learns from every window, so that speculation stays off only while clipping always acts.
    """

    def __init__(self) -> None:
        self.score = 1.0
        """How often the assumption held lately, from 0 to 1."""

    @property
    def bets(self) -> bool:
        return self.score >= _ENOUGH

    def observe(self, held: bool) -> None:
        """Learn whether the assumption held in one window."""
        self.score = _MEMORY * self.score + (1.0 - _MEMORY) * held


class Pass:
    """The step of one tile into a spare buffer; it owns all that it reads and writes, whatever becomes of the window.

    Making it moves the tile from READY to STEPPING. The tile's buffer and gradients will only be read, so the outputs
    must be neither the gradients' own memory nor the parameters. Gradients may still be on their way.
    ``slot`` has the outputs; the copy that was published from it last is waited for.
    """

    def __init__(
        self, tile: Tile, steps: Sequence[SegmentStep], into: Tensor, scale: Scale, slot: Slot | None = None
    ) -> None:
        assert tile.buffer is not None
        self.tile = tile
        self.source, self.target = tile.buffer, into
        self.scale = scale
        self.slot = slot
        self.rules = {step.segment.layout.parameter: step.rule for step in steps}
        self._rows, self._row_rules = step_table(steps, [tile.queued_gradient(step.segment) for step in steps])
        self._copies = [step.segment.handle for step in steps if step.segment.handle is not None]
        self._idle = tile.idle_parts(steps)
        tile.move(TileEvent.SPECULATE)
        self._version = tile.version
        self.failed = False
        self.put_off = False
        """Not on the worker: what is measured for the verdict comes first."""
        self.open = True
        """Not harvested yet."""

    @property
    def current(self) -> bool:
        """Whether no gradient came, and no window ended, since it began."""
        return self.tile.version == self._version

    def run(self, kernels: Kernels) -> None:
        """Wait for the gradients, and write the step's results into the spare buffer. Touches no tile."""
        if self.slot is not None and self.slot.last_publish is not None:
            self.slot.last_publish.wait()
        for copy in self._copies:  # before it begins, so that a recorder is told of the pass alone
            copy.wait()
        recorder, index = self.tile.recorder, self.tile.layout.index
        begin_ns = recorder.begin(STEP_AHEAD, index)
        try:
            for part in self._idle:  # idle means untouched, in either buffer
                self.target[:, part] = self.source[:, part]
            kernels.step_tile(self.source, self.target, self._rows, self._row_rules, self.scale)
        finally:
            recorder.passed(STEP_AHEAD, index, self.source, self._rows, begin_ns)

    def end(self, spares: BufferPool) -> bool:
        """STEPPING -> STEPPED, one call at a time with everything else that moves the tile.

        If the pass is not :attr:`current`, gives the spare buffer back and returns False; the tile stays as it is.
        """
        if not self.current:
            spares.give_back(self.target)
            return False
        self.tile.move(TileEvent.SPECULATED)
        self.tile.spare = self.target
        return True


class Speculator:
    """Steps tiles of one backend ahead, each as soon as it has the gradients that its last window brought.

    Args:
        memory: limit of spare buffers, which come from ``spares``, and of outputs; 0: every tile waits for the verdict.
        spares: a pool for spare buffers alone.
        transfer: makes memory for outputs.
        kernels: run the passes, on ``runner`` and behind what was queued before.
        runner: the worker that adds later arrivals.
        parts_of: returns a parameter's tiles and segments.
    """

    def __init__(
        self,
        memory: SpeculationMemory,
        spares: BufferPool,
        transfer: Transfer,
        kernels: Kernels,
        runner: JobRunner,
        parts_of: Callable[[int], Sequence[tuple[Tile, Segment]]],
    ) -> None:
        # Fixed.
        self.forecast: Forecast | None = None
        self._memory = memory
        self._pool = spares
        self.spares = spares if memory else None
        """Buffers to step into ahead of the verdict; None: there are none."""
        self._transfer = transfer
        self._kernels = kernels
        self._runner = runner
        self._norms = EarlyNorms(kernels, parts_of)
        # Grow with tiles.
        self._reserved_for = self._spare_count = self._spare_buffer_bytes = self.spare_bytes = 0
        self._slots: dict[tuple[int, int], list[Slot]] = {}
        """By elements of a buffer and bytes of an output; each stands for a buffer in the pool, too."""
        # Change with each window.
        self._predictor = Predictor()
        self._paused = False
        self._considered: set[int] = set()
        self._passes: dict[int, Pass] = {}
        self._counts: dict[str, int] = dict.fromkeys(("begun", KEPT, REDONE, DROPPED, "waited"), 0)
        self._last = dict(self._counts)
        self._rules: Mapping[int, HostRule] | None = None

    @property
    def record(self) -> SpeculationRecord | None:
        """None: nothing is ever bet on."""
        if not self._memory:
            return None
        return SpeculationRecord(self._predictor.score, self._predictor.bets, self._spare_count, **self._last)

    def lend(self, buffer_numel: int) -> Tensor | None:
        """A spare buffer, to be given back to :attr:`spares`, as it is or another one; None: all are in use."""
        return self._pool.take_within(buffer_numel, self._spare_buffer_bytes)

    # -- during backward ------------------------------------------------------

    def consider(self, tile: Tile) -> None:
        """A gradient arrived, perhaps the last that the tile will get. One caller at a time."""
        forecast = self.forecast if self._memory else None
        if forecast is None or not tile.complete or tile.buffer is None or tile.layout.index in self._considered:
            return
        # Once a window: where more comes after all, each arrival would walk the whole tile again.
        self._considered.add(tile.layout.index)
        if self._norms.wanted:
            due, scale = self._norms.due(tile), forecast.scale()
            self._runner.submit(lambda: self._measure(due, scale), 0)
        if self._predictor.bets:
            tile.move(TileEvent.COMPLETE)
            self._bet_on(tile, forecast)

    def _bet_on(self, tile: Tile, forecast: Forecast) -> None:
        free = self._slots.get((tile.layout.buffer_numel, tile.output_bytes))
        if not free:
            self._counts["waited"] += 1
            return
        if self._rules is None:
            self._rules = {}
            with contextlib.suppress(Exception):  # step() will say what is wrong with a group
                self._rules = forecast.rules()
        rules, active = self._rules, [segment for segment in tile.segments.values() if segment.arrivals > 0]
        if any(segment.layout.parameter not in rules for segment in active):
            return
        buffer = self.lend(tile.layout.buffer_numel)
        if buffer is None:  # a snapshot still reads what was a tile's before
            self._counts["waited"] += 1
            return
        slot = free.pop()
        steps = [
            SegmentStep(segment, rules[segment.layout.parameter], slot.view(tile.dtype, segment.layout))
            for segment in active
        ]
        bet = self._passes[tile.layout.index] = Pass(tile, steps, buffer, forecast.scale(), slot)
        self._counts["begun"] += 1
        self._runner.submit(lambda: self._run(bet), 0)

    def _measure(self, due: Sequence[Due], scale: Scale) -> None:
        with contextlib.suppress(Exception):  # it will be measured at the verdict, and raise there
            self._norms.measure(due, scale)

    def _run(self, bet: Pass) -> None:
        """On the worker. Whatever fails here is tried again at the verdict, and raises there."""
        if not bet.current:
            bet.failed = True  # nobody wants it any more
        elif self._paused:
            bet.put_off = True
        else:
            try:
                bet.run(self._kernels)
            except Exception:
                bet.failed = True

    # -- at the verdict -------------------------------------------------------

    def known_squares(self, scale: Scale) -> Mapping[int, Sequence[float]]:
        """By parameter, the sums of squares of its blocks, where they were added up in backward and still hold."""
        return self._norms.known(scale) if self._memory else {}

    def pause(self) -> None:
        """Put off passes that have not begun: what is measured for the verdict comes first."""
        self._paused = True

    def resume(self) -> None:
        """After :meth:`pause` and :meth:`harvest`: go on with them, while the verdict is on its way."""
        self._paused = False
        for bet in [bet for bet in self._passes.values() if bet.put_off]:
            bet.put_off = False
            self._runner.submit(lambda bet=bet: self._run(bet), 0)

    def harvest(self) -> None:
        """The worker is drained: every pass has ended or is put off. Afterwards no other tile is STEPPING."""
        for bet in self._passes.values():
            if not bet.open or (bet.put_off and self._paused):
                continue
            bet.open = False
            if not bet.end(self._pool):
                self._count(DROPPED, bet.tile)
            # One that is still put off was so when Ctrl-C ended the wait for it.
            elif bet.failed or bet.put_off:
                bet.tile.redo(self._pool)

    def void(self, tile: Tile) -> None:
        """Something that a pass read is about to change; after :meth:`harvest`."""
        self._norms.forget(tile.segments)
        if tile.state is TileState.STEPPED:
            self._count(DROPPED, tile)
            tile.redo(self._pool)

    def drop(self, tile: Tile) -> None:
        """The tile was moved, and what was stepped ahead for it is not wanted any more."""
        if tile.spare is not None:
            self._count(DROPPED, tile)
            tile.drop_spare(self._pool)

    def _count(self, event: str, tile: Tile) -> None:
        self._counts[event] += 1
        tile.recorder.mark(event, tile.layout.index)

    def set_arrays(self, buffer_arrays: int) -> None:
        """Buffers have another number of arrays from here on; no tile is STEPPING or STEPPED."""
        # Spares are made anew, those of passes that are out too.
        self._pool.set_arrays(buffer_arrays)
        self._passes.clear()
        self._slots.clear()
        self._reserved_for = self._spare_count = self._spare_buffer_bytes = self.spare_bytes = 0

    def verdict(self, tile: Tile, active: Sequence[tuple[Segment, ParameterStep]], scale: Scale) -> Slot | None:
        """Where the new parameters are, if the tile was stepped ahead as it is to be stepped; it is COMMITTED then."""
        if tile.state is not TileState.STEPPED:
            return None
        bet = self._passes[tile.layout.index]
        if bet.scale == scale and bet.rules == {segment.layout.parameter: step.rule for segment, step in active}:
            tile.keep_spare(self._pool)
            self._count(KEPT, tile)
            return bet.slot
        tile.redo(self._pool)
        self._count(REDONE, tile)
        return None

    def end_window(self, tiles: Sequence[Tile], scale: Scale | None) -> None:
        """After :meth:`harvest`; ``scale`` is what the window was stepped with, None where it was discarded."""
        if not self._memory:
            return
        for bet in self._passes.values():
            assert bet.slot is not None
            self._slots[bet.tile.layout.buffer_numel, bet.tile.output_bytes].append(bet.slot)
        self._passes.clear()
        self._considered.clear()
        self._rules = None
        self._norms.end_window(stepped=scale is not None)
        if scale is None:
            return
        if self.forecast is not None:
            self._predictor.observe(scale == self.forecast.scale())
        self._last, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        with_buffers = [tile for tile in tiles if tile.buffer is not None]
        if len(with_buffers) != self._reserved_for:
            self._reserve(with_buffers)

    def _reserve(self, tiles: Sequence[Tile]) -> None:
        """Make the spares: the tiles of the last parameters come first in backward, and in the budget."""
        self._reserved_for = len(tiles)
        have = {key: len(slots) for key, slots in self._slots.items()}
        most = sum(self._pool.buffer_bytes(tile.layout.buffer_numel) + tile.output_bytes for tile in tiles)
        budget = speculation_budget(self._memory, most) - self.spare_bytes
        wanted = []
        for tile in reversed(tiles):
            key = (tile.layout.buffer_numel, tile.output_bytes)
            if have.get(key, 0) > 0:
                have[key] -= 1
                continue
            budget -= self._pool.buffer_bytes(tile.layout.buffer_numel) + tile.output_bytes
            if budget < 0:
                break
            wanted.append(tile)
        slots, output_bytes = cut_slots(self._transfer, [tile.output_bytes for tile in wanted])
        for tile, slot in zip(wanted, slots, strict=True):
            self._slots.setdefault((tile.layout.buffer_numel, tile.output_bytes), []).append(slot)
        buffer_bytes = sum(self._pool.buffer_bytes(tile.layout.buffer_numel) for tile in wanted)
        self._spare_buffer_bytes += buffer_bytes
        self.spare_bytes += buffer_bytes + output_bytes
        # Touched now, not in backward.
        for buffer in [self._pool.take(tile.layout.buffer_numel).zero_() for tile in wanted]:
            self._pool.give_back(buffer)
        self._spare_count += len(wanted)

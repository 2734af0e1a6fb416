"""Stepping tiles while backward still runs, on the bet that neither gradients nor scale will change.

A pass reads the tile's buffer and gradients and writes a spare buffer and spare outputs. At the verdict the spare
becomes the tile's buffer, or is dropped: undoing a step is exact because nothing was ever overwritten (law 5).

Passes run on the worker, after the additions that were queued before them. The worker never changes a tile's state:
threads that bring gradients and the caller do, in :meth:`Speculator.harvest` for passes that have ended. Whether to bet
at all follows from how earlier windows ended, and from the memory there is.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from longshore.byte_sizes import parse_memory_budget
from longshore.kernels import Buffer, HostRule, Kernels, Scale, copy_elements, pass_ahead
from longshore.layout.tiles import padded_bytes
from longshore.machine import available_bytes
from longshore.tiles.events import DROPPED, KEPT, MEASURE, REDONE, STEP_AHEAD
from longshore.tiles.memory import BufferKind, BufferPool, Slot, cut_slots
from longshore.tiles.tile import Forecast, ParameterStep, Segment, SegmentStep, Tile, TileEvent, TileState, step_table
from longshore.transfer import Copy, CopyStreams, wait_for_all
from longshore.transfer.runner import JobRunner

SpeculationMemory = int | str
"""Argument of :func:`longshore.byte_sizes.parse_memory_budget`; 100 % is the memory of a spare for every tile."""

_AUTO_PART = 4
_MEMORY = 0.75
"""Weight of all earlier verdicts against the last one: about four windows count."""
_ENOUGH = 0.5


def memory_for_speculation() -> int:
    """Return how many bytes ``"auto"`` grants at most to all processes of this machine together."""
    return available_bytes() // _AUTO_PART


def speculation_budget(memory: SpeculationMemory, most: int, taken: int = 0) -> int:
    """Return the number of bytes for spares, if a spare for every tile would take ``most``; of a fixed number of bytes,
    others have ``taken`` some."""
    budget = parse_memory_budget(memory)
    if budget.byte_count is not None:
        return budget.byte_count - taken
    return min(most, memory_for_speculation() - taken) if budget.share is None else int(most * budget.share)


class SpeculationRecord(NamedTuple):
    """State of speculation, and counts of its tiles in the last window."""

    score: float
    """How often the assumed verdict was the true one lately, from 0 to 1."""
    bets: bool
    """Whether tiles will be stepped ahead in the next window."""
    spares: int
    """Tiles that can be stepped ahead at once."""
    begun: int = 0
    kept: int = 0
    redone: int = 0
    """Tiles stepped ahead, and then again with the true scale, rule or parameters."""
    dropped: int = 0
    """Tiles stepped ahead in vain: one more gradient came, or the window was discarded."""
    waited: int = 0
    """Tiles that were complete when no spare was left."""

    def and_of(self, other: SpeculationRecord) -> SpeculationRecord:
        """Return the record of the tiles of both."""
        counts = (mine + theirs for mine, theirs in zip(self[2:], other[2:], strict=True))
        return SpeculationRecord(min(self.score, other.score), self.bets or other.bets, *counts)


class Predictor:
    """Predictor of verdicts, which bets as long as most of the last verdicts were the assumed one.

    It learns from every window, so that speculation stays off only while every window is clipped.
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


class Due(NamedTuple):
    """A parameter whose whole gradient is queued, with the tensors that will have it and the copies to wait for."""

    parameter: int
    versions: list[int]
    gradients: list[Tensor]
    copies: list[Copy]


class _Squares(NamedTuple):
    versions: list[int]
    scale: Scale
    blocks: list[float]


class EarlyNorms:
    """Sums of squares of a window's gradients; ``parts_of`` returns the tiles and segments of a parameter.

    A parameter is measured once its last tile is complete. Its sums are valid until any of its tiles gets a gradient.
    """

    def __init__(self, kernels: Kernels, parts_of: Callable[[int], Sequence[tuple[Tile, Segment]]]) -> None:
        self._kernels = kernels
        self._parts_of = parts_of
        self.wanted = False
        """Whether the last window asked for a norm."""
        self._asked = False
        self._sums: dict[int, _Squares] = {}

    def due(self, tile: Tile) -> list[Due]:
        """Return the parameters of a tile that can be measured after the jobs that are queued now.

        Versions and gradients are read here, while no gradient can arrive: on the worker, a version could already
        count an arrival that is not queued yet.
        """
        found = []
        for parameter in tile.segments:
            parts = self._parts_of(parameter)
            if all(part.complete and segment.arrivals > 0 for part, segment in parts):
                gradients = [part.queued_gradient(segment) for part, segment in parts]
                copies = [segment.handle for _, segment in parts if segment.handle is not None]
                found.append(Due(parameter, [part.version for part, _ in parts], gradients, copies))
        return found

    def measure(self, due: Sequence[Due], scale: Scale) -> None:
        """Measure parameters on the worker, after every addition that was queued when they became due."""
        wait_for_all(copy for one in due for copy in one.copies)
        blocks = self._kernels.block_sums([one.gradients for one in due], scale)
        for one, sums in zip(due, blocks, strict=True):
            self._sums[one.parameter] = _Squares(one.versions, scale, sums)

    def known(self, scale: Scale) -> Mapping[int, Sequence[float]]:
        """Return the sums of blocks that are still valid, by parameter; the worker must be drained."""
        self._asked = True
        return {
            parameter: sums.blocks
            for parameter, sums in self._sums.items()
            if sums.scale == scale and sums.versions == [tile.version for tile, _ in self._parts_of(parameter)]
        }

    def forget(self, parameters: Mapping[int, object]) -> None:
        """Drop the sums of parameters whose gradients are about to be written."""
        for parameter in self._sums.keys() & parameters.keys():  # as long as the shorter of both
            del self._sums[parameter]

    def end_window(self, stepped: bool) -> None:
        """Drop all sums. If a window that was stepped asked for a norm, the next one is expected to ask, too."""
        self._sums.clear()
        if stepped:
            self.wanted, self._asked = self._asked, False


class Bet:
    """Step of one tile into a spare buffer, or of some arrays of it; it owns all that it reads and writes, whatever
    happens to the window.

    The constructor moves the tile from READY to STEPPING. The tile's buffer and gradients will only be read, so the
    outputs must be neither the gradients' own memory nor the parameters. Gradients may still be on their way.
    ``slot`` takes the outputs; the pass waits for the last copy that was published from it. ``arrays``: the arrays of
    float32 buffers that are read and written; None: all, of buffers of any format.
    """

    def __init__(
        self,
        tile: Tile,
        steps: Sequence[SegmentStep],
        into: Buffer,
        scale: Scale,
        slot: Slot | None = None,
        arrays: slice | None = None,
    ) -> None:
        assert tile.buffer is not None
        self.tile = tile
        self.source, self.target = tile.buffer, into
        self._unused: Buffer | None = into
        self._arrays = arrays
        self.scale = scale
        self.slot = slot
        self.rules = {step.segment.layout.parameter: step.rule for step in steps}
        self._rows, self._row_rules = step_table(steps, [tile.queued_gradient(step.segment) for step in steps])
        self._copies = [step.segment.handle for step in steps if step.segment.handle is not None]
        self._idle = tile.idle_parts(steps)
        tile.move(TileEvent.SPECULATE)
        self._version = tile.version
        self.failed = False
        self.spent = False
        """Whether the outputs may have been overwritten."""
        self.put_off = False
        """Whether the pass is postponed, because measurements for the verdict come first."""
        self.open = True
        """Whether the pass has not been harvested yet."""

    @property
    def current(self) -> bool:
        """Whether no gradient came, and no window ended, since the pass was made."""
        return self.tile.version == self._version

    def run(self, kernels: Kernels) -> None:
        """Wait for the gradients, and write the step's results into the spare buffer. This changes no tile."""
        if self.slot is not None and self.slot.last_publish is not None:
            self.slot.last_publish.wait()
        wait_for_all(self._copies)  # before begin(), so that a recorder times the pass alone
        source, target = self.source, self.target
        if self._arrays is not None:
            assert isinstance(source, Tensor) and isinstance(target, Tensor)
            source, target = source[self._arrays], target[self._arrays]
        recorder, index = self.tile.recorder, self.tile.layout.index
        begin_ns = recorder.begin(STEP_AHEAD, index)
        try:
            for part in self._idle:  # elements that are not stepped keep their values
                copy_elements(target, source, part)
            kernels.step_tile(source, target, self._rows, self._row_rules, self.scale)
        finally:
            recorder.passed(STEP_AHEAD, index, source, self._rows, begin_ns)

    def end(self, spares: BufferPool) -> bool:
        """Make the spare buffer the tile's spare (STEPPING -> STEPPED). No other thread may move the tile meanwhile.

        If the pass is not :attr:`current`, give the spare buffer back and return False; the tile stays as it is.
        """
        # Ctrl-C may come anywhere here, and this is called again.
        if not self.current:
            target, self._unused = self._unused, None
            if target is not None:
                spares.give_back(target)
            return False
        if self.tile.state is TileState.STEPPING:
            self.tile.spare = self.target
            self.tile.move(TileEvent.SPECULATED)
        return True


class SpareKind(NamedTuple):
    """The properties of a spare: a buffer, and a slot for outputs."""

    buffer: BufferKind
    output_bytes: int
    of_matrix: bool

    @classmethod
    def of(cls, tile: Tile) -> SpareKind:
        return cls(tile.buffer_kind, tile.output_bytes, tile.arrays.of_matrices)

    @property
    def asked_bytes(self) -> int:
        """Bytes that count against the memory for stepping ahead."""
        return self.buffer.num_bytes + self.output_bytes

    @property
    def num_bytes(self) -> int:
        return self.buffer.num_bytes + padded_bytes(self.output_bytes)


class Speculator:
    """Stepping ahead for the tiles of one tier, each as soon as it has as many gradients as in its last window, by
    the part of its step that may go ahead (:func:`~longshore.kernels.pass_ahead`).

    Args:
        memory: limit of spare buffers, which come from ``spares``, and of outputs; 0: every tile waits for the verdict.
        spares: a pool for spare buffers alone.
        streams: allocates memory for outputs.
        kernels: run the passes, on ``runner``, after the jobs that were queued before.
        runner: the worker that adds later arrivals.
        parts_of: returns a parameter's tiles and segments.
    """

    def __init__(
        self,
        memory: SpeculationMemory,
        spares: BufferPool,
        streams: CopyStreams,
        kernels: Kernels,
        runner: JobRunner,
        parts_of: Callable[[int], Sequence[tuple[Tile, Segment]]],
    ) -> None:
        # Fixed.
        self.forecast: Forecast | None = None
        self._memory = memory
        self._pool = spares
        self.spares = spares if memory else None
        """Pool of buffers to step into ahead of the verdict; None: there are none."""
        self._streams = streams
        self._kernels = kernels
        self._runner = runner
        self._norms = EarlyNorms(kernels, parts_of)
        # Grow with tiles.
        self._reserved_for = 0
        """Number of tiles with buffers for which there are spares, as far as the memory allows."""
        self._reserved: Counter[SpareKind] = Counter()
        self._slots: dict[SpareKind, list[Slot]] = {}
        """Slots that no bet has; for each slot there is a buffer in the pool, too."""
        # Change with each window.
        self._predictor = Predictor()
        self._paused = False
        self._considered: set[int] = set()
        self._bets: dict[int, Bet] = {}
        self._counts: dict[str, int] = dict.fromkeys(("begun", KEPT, REDONE, DROPPED, "waited"), 0)
        self._last = dict(self._counts)
        self._rules: Mapping[int, HostRule] | None = None

    @property
    def record(self) -> SpeculationRecord | None:
        """Record of speculation in the last window; None if tiles are never stepped ahead."""
        if not self._memory:
            return None
        return SpeculationRecord(self._predictor.score, self._predictor.bets, self._reserved.total(), **self._last)

    @property
    def spare_bytes(self) -> int:
        """Bytes of all spares."""
        return sum(count * kind.num_bytes for kind, count in self._reserved.items())

    def lend(self, kind: BufferKind) -> Buffer | None:
        """Return a spare buffer, or None if all are in use. The caller gives it, or another one, to :attr:`spares`."""
        most_bytes = sum(count * each.buffer.num_bytes for each, count in self._reserved.items())
        return self._pool.take_within(kind, most_bytes)

    # -- during backward ------------------------------------------------------

    def consider(self, tile: Tile) -> None:
        """Step the tile ahead if the gradient that arrived completes it. Only one thread may call this at a time."""
        forecast = self.forecast if self._memory else None
        if forecast is None or not tile.complete or tile.buffer is None or tile.layout.index in self._considered:
            return
        # Only once per window: if more gradients come after all, each arrival would walk the whole tile again.
        self._considered.add(tile.layout.index)
        if self._norms.wanted:
            due, scale = self._norms.due(tile), forecast.scale()
            self._runner.submit(lambda: self._measure(tile, due, scale), 0)
        if self._predictor.bets:
            tile.move(TileEvent.COMPLETE)
            self._bet_on(tile, forecast)

    def _bet_on(self, tile: Tile, forecast: Forecast) -> None:
        free = self._slots.get(SpareKind.of(tile))
        if not free:
            self._counts["waited"] += 1
            return
        if self._rules is None:
            self._rules = {}
            with contextlib.suppress(Exception):  # step() will report what is wrong with a group
                self._rules = forecast.rules()
        rules, active = self._rules, [segment for segment in tile.segments.values() if segment.arrivals > 0]
        if any(segment.layout.parameter not in rules for segment in active):
            return
        buffer = self.lend(tile.buffer_kind)
        if buffer is None:  # a snapshot still reads former buffers of tiles
            self._counts["waited"] += 1
            return
        slot = free.pop()
        passes = [pass_ahead(rules[segment.layout.parameter]) for segment in active]
        steps = [
            SegmentStep(segment, each.rule, slot.view(each.output_dtype or tile.dtype, segment.layout))
            for segment, each in zip(active, passes, strict=True)
        ]
        arrays = passes[0].arrays  # matrices have tiles of their own
        bet = self._bets[tile.layout.index] = Bet(tile, steps, buffer, forecast.scale(), slot, arrays)
        self._counts["begun"] += 1
        self._runner.submit(lambda: self._run(bet), 0)

    def _measure(self, tile: Tile, due: Sequence[Due], scale: Scale) -> None:
        recorder = tile.recorder
        begin_ns = recorder.begin(MEASURE, tile.layout.index)
        try:
            with contextlib.suppress(Exception):  # the norm is measured again at the verdict, and raises there
                self._norms.measure(due, scale)
        finally:
            recorder.span(MEASURE, tile.layout.index, begin_ns)

    def _run(self, bet: Bet) -> None:
        """Run a pass, on the worker. A pass that fails here is repeated at the verdict, and raises there."""
        if not bet.current:
            bet.failed = True  # its result is no longer needed
        elif self._paused:
            bet.put_off = True
        else:
            try:
                bet.run(self._kernels)
            except Exception:
                bet.failed = True

    # -- at the verdict -------------------------------------------------------

    def known_squares(self, scale: Scale) -> Mapping[int, Sequence[float]]:
        """Return, by parameter, the sums of squares of blocks that were computed in backward and are still valid."""
        return self._norms.known(scale) if self._memory else {}

    def pause(self) -> None:
        """Postpone passes that have not begun, because measurements for the verdict come first."""
        self._paused = True

    def resume(self) -> None:
        """Run the postponed passes, after :meth:`pause` and :meth:`harvest`, while the verdict is on its way."""
        self._paused = False
        for bet in [bet for bet in self._bets.values() if bet.put_off]:
            bet.put_off = False
            self._runner.submit(lambda bet=bet: self._run(bet), 0)

    def harvest(self) -> None:
        """Collect ended passes, after the worker was drained. Only tiles of postponed passes stay STEPPING."""
        for bet in self._bets.values():
            if not bet.open or (bet.put_off and self._paused):
                continue
            if not bet.end(self._pool):
                self._count(DROPPED, bet.tile)
            # A pass is still postponed here only if Ctrl-C interrupted the wait for it.
            elif (bet.failed or bet.put_off) and bet.tile.state is TileState.STEPPED:
                bet.tile.redo(self._pool)
            bet.open = False

    def void(self, tile: Tile) -> None:
        """Drop the results ahead for a tile whose data is about to change; called after :meth:`harvest`."""
        self._norms.forget(tile.segments)
        if tile.state is TileState.STEPPED:
            self._count(DROPPED, tile)
            tile.redo(self._pool)

    def drop(self, tile: Tile) -> None:
        """Drop the spare of a tile that has left STEPPED without using it, if there is one."""
        if tile.spare is not None:
            self._count(DROPPED, tile)
            tile.drop_spare(self._pool)

    def _count(self, event: str, tile: Tile) -> None:
        self._counts[event] += 1
        tile.recorder.mark(event, tile.layout.index)

    def forget(self, tiles: Iterable[Tile]) -> None:
        """Drop the spares of tiles whose buffers get other arrays, and those that bets of this window have; none of the
        tiles may be STEPPING or STEPPED."""
        kinds = set()
        for tile in tiles:
            kinds.add(SpareKind.of(tile))
            self._bets.pop(tile.layout.index, None)
        for kind in kinds:
            self._slots.pop(kind, None)
            self._reserved.pop(kind, None)
        self._pool.forget(kind.buffer for kind in kinds)
        self._reserved_for = 0

    def verdict(
        self, tile: Tile, active: Sequence[tuple[Segment, ParameterStep]], scale: Scale, written: bool
    ) -> Slot | None:
        """Return the slot with the outputs if the tile was stepped ahead as required; :meth:`keep` then commits it.

        ``written``: whether its parameters were written, which a step ahead does not read."""
        if tile.state is not TileState.STEPPED:
            return None
        bet = self._bets[tile.layout.index]
        rules = {segment.layout.parameter: pass_ahead(step.rule).rule for segment, step in active}
        if bet.scale == scale and bet.rules == rules and not (written or bet.spent):
            return bet.slot
        tile.redo(self._pool)
        self._count(REDONE, tile)
        return None

    def spend(self, tile: Tile) -> None:
        """Note that the outputs are about to be overwritten. A commit that fails before :meth:`keep`, and is made once
        more, steps the tile again."""
        self._bets[tile.layout.index].spent = True

    def keep(self, tile: Tile) -> None:
        """Commit a tile that was stepped ahead: its spare becomes its buffer."""
        tile.keep_spare(self._pool)
        self._count(KEPT, tile)

    def end_window(self, tiles: Sequence[Tile], scale: Scale | None) -> None:
        """End the window, after :meth:`harvest`; ``scale`` is the scale of its step, None if it was discarded."""
        if not self._memory:
            return
        for bet in self._bets.values():
            assert bet.slot is not None
            self._slots[SpareKind.of(bet.tile)].append(bet.slot)
        self._bets.clear()
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
        """Allocate spares within the memory, of which matrices have the first part."""
        self._reserved_for = len(tiles)
        for of_matrices in (True, False):
            self._reserve_alike([SpareKind.of(tile) for tile in tiles if tile.arrays.of_matrices is of_matrices])

    def _reserve_alike(self, kinds: Sequence[SpareKind]) -> None:
        """Allocate spares for tiles of these kinds, first for those of the last parameters, whose gradients come first
        in backward."""
        if not kinds:
            return
        held = {True: 0, False: 0}
        for kind, count in self._reserved.items():
            held[kind.of_matrix] += count * kind.num_bytes
        mine, others = held[kinds[0].of_matrix], held[not kinds[0].of_matrix]
        left = speculation_budget(self._memory, sum(kind.asked_bytes for kind in kinds), others) - mine
        have, wanted = Counter(self._reserved), Counter[SpareKind]()
        for kind in reversed(kinds):
            if have[kind] > 0:
                have[kind] -= 1
                continue
            left -= kind.asked_bytes
            if left < 0:
                break
            wanted[kind] += 1
        for kind, count in wanted.items():
            slots, _ = cut_slots(self._streams, [kind.output_bytes] * count)
            free = self._slots.setdefault(kind, [])
            free += slots
            self._reserved[kind] += count
            # The memory is touched now, and not in backward; the pool hands out those that it has first.
            for buffer in [self._pool.take(kind.buffer).zero_() for _ in free]:
                self._pool.give_back(buffer)

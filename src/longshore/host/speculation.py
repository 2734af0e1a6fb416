"""Stepping tiles while backward still runs, on the bet that neither gradients nor scale will change.

A pass reads the tile's page and gradients and writes a spare page and spare
outputs. At the verdict the spare becomes the tile's, or is dropped: undoing a
step restores bytes because nothing of it was ever overwritten (law 5).

Passes run on the worker, behind the additions that were queued before them.
Tiles are moved by the threads that bring gradients and by the caller's alone:
the worker only reports, and :meth:`Speculator.harvest` moves the tiles.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from longshore.byte_sizes import parse_memory_budget
from longshore.host.early_norms import Due, EarlyNorms
from longshore.host.events import DROPPED, KEPT, REDONE, STEP_AHEAD
from longshore.host.memory import PagePool, Slot, SlotSlab, available_bytes
from longshore.host.stepping import (
    Forecast,
    ParameterStep,
    Record,
    SegmentStep,
    Speculation,
    Speculator,
    begin_speculation,
    drop,
    end_speculation,
    fail_speculation,
    keep,
    redo,
    run_speculation,
)
from longshore.host.tile import Segment, Tile, TileEvent, TileState
from longshore.host.worker import JobRunner
from longshore.kernels import HostKernels, HostRule, Scale
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


class Predictor:
    """Bets while the last verdicts were mostly the assumed one.

    It learns from every window, whether or not anything was bet on it, so that
    speculation stays off while clipping always acts and comes back when it no
    longer does.
    """

    def __init__(self) -> None:
        self.score = 1.0
        """How often the assumption held lately, from 0 to 1."""

    @property
    def bets(self) -> bool:
        return self.score >= _ENOUGH

    def observe(self, held: bool) -> None:
        """The verdict of one window: did the assumption hold?"""
        self.score = _MEMORY * self.score + (1.0 - _MEMORY) * held


@dataclass
class _Bet:
    """One tile's pass, from its beginning to the end of the window."""

    tile: Tile
    speculation: Speculation
    slot: Slot
    rules: dict[int, HostRule]
    scale: Scale
    failed: bool = False
    held: bool = False
    """Put off, and not on the worker."""
    open: bool = True
    """Not harvested yet."""


class Ahead(Speculator):
    """Steps a tile ahead as soon as it has the gradients that its last window brought.

    Args:
        memory: how much spare pages and outputs may take.
        spares: a pool for spare pages alone.
        transfer: makes memory for outputs.
        kernels: run the passes.
        worker: runs them behind what was queued before.
        parts_of: a parameter's tiles and segments.
    """

    def __init__(
        self,
        memory: SpeculationMemory,
        spares: PagePool,
        transfer: Transfer,
        kernels: HostKernels,
        worker: JobRunner,
        parts_of: Callable[[int], Sequence[tuple[Tile, Segment]]],
    ) -> None:
        # Fixed.
        self._memory = memory
        self._pool = self.spares = spares
        self._transfer = transfer
        self._kernels = kernels
        self._worker = worker
        self._norms = EarlyNorms(kernels, parts_of)
        # Grow with tiles.
        self._reserved_for = 0
        self._slabs: list[SlotSlab] = []
        self._slots: dict[tuple[int, int], list[Slot]] = {}
        """By elements of a page and bytes of an output; each stands for a page in the pool, too."""
        self._spare_count = 0
        self._spare_page_bytes = 0
        # Change with each window.
        self._predictor = Predictor()
        self._holding = False
        self._considered: set[int] = set()
        self._bets: dict[int, _Bet] = {}
        self._counts = dict.fromkeys(("begun", "kept", "redone", "dropped", "waited"), 0)
        self._last = dict(self._counts)
        self._rules: Mapping[int, HostRule] | None = None

    @property
    def record(self) -> Record:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Record(self._predictor.score, self._predictor.bets, self._spare_count, **self._last)

    @property
    def spare_bytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._spare_page_bytes + sum(slab.allocated_bytes for slab in self._slabs)

    def lend(self, page_numel: int) -> Tensor | None:
        return self._pool.take_within(page_numel, self._spare_page_bytes)

    # -- during backward ------------------------------------------------------

    def consider(self, tile: Tile) -> None:
        forecast = self.forecast
        if forecast is None or not tile.complete or tile.page is None or tile.layout.index in self._considered:
            return
        # Once a window: where more comes after all, each arrival would walk the whole tile again.
        self._considered.add(tile.layout.index)
        if self._norms.wanted:
            due, scale = self._norms.due(tile), forecast.scale()
            self._worker.submit(lambda: self._measure(due, scale), 0)
        if self._predictor.bets:
            tile.move(TileEvent.COMPLETE)
            self._bet_on(tile, forecast)

    def _bet_on(self, tile: Tile, forecast: Forecast) -> None:
        free = self._slots.get((tile.layout.page_numel, tile.output_bytes))
        if not free:
            self._counts["waited"] += 1
            return
        rules = self._planned(forecast)
        active = [segment for segment in tile.segments.values() if segment.arrivals > 0]
        if any(segment.layout.parameter not in rules for segment in active):
            return
        page = self.lend(tile.layout.page_numel)
        if page is None:  # a snapshot still reads what was a tile's before
            self._counts["waited"] += 1
            return
        slot = free.pop()
        steps = [
            SegmentStep(
                segment,
                rules[segment.layout.parameter],
                slot.view(tile.dtype, segment.layout.page_offset, segment.layout.numel),
            )
            for segment in active
        ]
        bet = _Bet(
            tile,
            begin_speculation(tile, steps, page),
            slot,
            {step.segment.layout.parameter: step.rule for step in steps},
            forecast.scale(),
        )
        self._bets[tile.layout.index] = bet
        self._counts["begun"] += 1
        self._worker.submit(lambda: self._run(bet), 0)

    def _planned(self, forecast: Forecast) -> Mapping[int, HostRule]:
        if self._rules is None:
            self._rules = {}
            with contextlib.suppress(Exception):  # step() will say what is wrong with a group
                self._rules = forecast.rules()
        return self._rules

    def _measure(self, due: Sequence[Due], scale: Scale) -> None:
        with contextlib.suppress(Exception):  # it will be measured at the verdict, and raise there
            self._norms.measure(due, scale)

    def _run(self, bet: _Bet) -> None:
        """On the worker. Whatever fails here is tried again at the verdict, and raises there."""
        if bet.tile.version != bet.speculation.version:
            bet.failed = True  # nobody wants it any more
            return
        if self._holding:
            bet.held = True
            return
        try:
            if bet.slot.last_publish is not None:
                bet.slot.last_publish.wait()
            for copy in bet.speculation.copies:  # here, so that a pass is told without what it waits for
                copy.wait()
            self._pass(bet)
        except Exception:
            bet.failed = True

    def _pass(self, bet: _Bet) -> None:
        speculation, recorder = bet.speculation, bet.tile.recorder
        begin_ns = recorder.begin(STEP_AHEAD, bet.tile.layout.index)
        try:
            run_speculation(speculation, bet.scale, self._kernels)
        finally:
            recorder.passed(STEP_AHEAD, bet.tile.layout.index, speculation.page, speculation.rows, begin_ns)

    # -- at the verdict -------------------------------------------------------

    def known_squares(self, scale: Scale) -> Mapping[int, Sequence[float]]:
        return self._norms.known(scale)

    def hold(self) -> None:
        self._holding = True

    def resume(self) -> None:
        self._holding = False
        for bet in [bet for bet in self._bets.values() if bet.held]:
            bet.held = False
            self._worker.submit(lambda bet=bet: self._run(bet), 0)

    def harvest(self) -> None:
        for bet in self._bets.values():
            if not bet.open or (bet.held and self._holding):
                continue
            bet.open = False
            # One that is still held was put off when Ctrl-C ended the wait for it.
            if (bet.failed or bet.held) and bet.tile.version == bet.speculation.version:
                fail_speculation(bet.tile, bet.speculation, self._pool)
            elif not end_speculation(bet.tile, bet.speculation, self._pool):
                self._count_dropped(bet.tile)

    def void(self, tile: Tile) -> None:
        self._norms.forget(tile.segments)
        if tile.state is TileState.STEPPED:
            self._count_dropped(tile)
            redo(tile, self._pool)

    def drop(self, tile: Tile) -> None:
        if tile.spare is not None:
            self._count_dropped(tile)
            drop(tile, self._pool)

    def _count_dropped(self, tile: Tile) -> None:
        self._counts["dropped"] += 1
        tile.recorder.mark(DROPPED, tile.layout.index)

    def set_arrays(self, page_arrays: int) -> None:
        # Spares are made anew, those of bets that are out too.
        self._pool.set_arrays(page_arrays)
        self._bets.clear()
        self._slots.clear()
        self._slabs.clear()
        self._reserved_for = self._spare_count = self._spare_page_bytes = 0

    def verdict(self, tile: Tile, active: Sequence[tuple[Segment, ParameterStep]], scale: Scale) -> Slot | None:
        if tile.state is not TileState.STEPPED:
            return None
        bet = self._bets[tile.layout.index]
        if bet.scale == scale and bet.rules == {segment.layout.parameter: step.rule for segment, step in active}:
            keep(tile, self._pool)
            self._counts["kept"] += 1
            tile.recorder.mark(KEPT, tile.layout.index)
            return bet.slot
        redo(tile, self._pool)
        self._counts["redone"] += 1
        tile.recorder.mark(REDONE, tile.layout.index)
        return None

    def end_window(self, tiles: Sequence[Tile], scale: Scale | None) -> None:
        for bet in self._bets.values():
            self._slots[bet.tile.layout.page_numel, bet.tile.output_bytes].append(bet.slot)
        self._bets.clear()
        self._considered.clear()
        self._rules = None
        self._norms.end_window(stepped=scale is not None)
        if scale is None:
            return
        if self.forecast is not None:
            self._predictor.observe(scale == self.forecast.scale())
        self._last, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        with_pages = [tile for tile in tiles if tile.page is not None]
        if len(with_pages) != self._reserved_for:
            self._reserve(with_pages)

    def _reserve(self, tiles: Sequence[Tile]) -> None:
        """Make the spares: the tiles of the last parameters come first in backward, and in the budget."""
        self._reserved_for = len(tiles)
        have = {key: len(slots) for key, slots in self._slots.items()}
        budget = self._budget(tiles) - self.spare_bytes
        wanted = []
        for tile in reversed(tiles):
            key = (tile.layout.page_numel, tile.output_bytes)
            if have.get(key, 0) > 0:
                have[key] -= 1
                continue
            budget -= self._pool.page_bytes(tile.layout.page_numel) + tile.output_bytes
            if budget < 0:
                break
            wanted.append(tile)
        self._slabs.append(slab := SlotSlab(self._transfer))
        for tile, slot in zip(wanted, slab.cut([tile.output_bytes for tile in wanted]), strict=True):
            self._slots.setdefault((tile.layout.page_numel, tile.output_bytes), []).append(slot)
            self._spare_page_bytes += self._pool.page_bytes(tile.layout.page_numel)
        for page in [
            self._pool.take(tile.layout.page_numel).zero_() for tile in wanted
        ]:  # touched now, not in backward
            self._pool.give_back(page)
        self._spare_count += len(wanted)

    def _budget(self, tiles: Sequence[Tile]) -> int:
        most = sum(self._pool.page_bytes(tile.layout.page_numel) + tile.output_bytes for tile in tiles)
        return speculation_budget(self._memory, most)

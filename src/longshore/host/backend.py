"""Where tiles are kept and stepped: how bytes move there, what computes there, and its memory.

Gradients come down to a backend during backward (:meth:`Backend.bring`) or in the step; :meth:`Backend.run` steps tiles
and publishes them, several at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from longshore.host.events import (
    ARRIVE,
    ARRIVE_AGAIN,
    COPY_TO_HOST,
    PIPELINE_DEPTH,
    PUBLISH,
    STEP_IN_PLACE,
    Move,
    commit_moves,
)
from longshore.host.memory import AccumulatorPool, PageHolds, PagePool, SlotRing, SlotSlab, allocator_on
from longshore.host.snapshot import Snapshots
from longshore.host.speculation import Ahead, SpeculationMemory
from longshore.host.stepping import ParameterStep, SegmentStep, Speculator, idle_parts, step_table
from longshore.host.tile import Segment, Tile, TileEvent, TileState
from longshore.host.worker import JobRunner, runner_for
from longshore.kernels import NORM_BLOCK_NUMEL, HostKernels, Kernels, Scale
from longshore.transfer import CopyHandle, Transfer

Active = list[tuple[Segment, ParameterStep]]
"""Those of a tile's segments that have a gradient."""


class BackendSettings(NamedTuple):
    """What one backend is made of.

    ``hold_gradients``: gradients arrive during backward and stay until the step, so that every tile has a slot of its
    own; otherwise a few slots go round. ``speculation_memory``: for tiles that are stepped ahead of the verdict.
    """

    transfer: Transfer
    kernels: Kernels
    tile_numel: int
    hold_gradients: bool
    speculation_memory: SpeculationMemory = 0


class OnDevice(NamedTuple):
    """Part of the state stays on the device and is stepped there; ``ratio`` of the elements are on the host."""

    settings: BackendSettings
    ratio: float


def kept_on_device(numels: Sequence[int], ratio: float) -> list[int]:
    """How many elements of each parameter stay on the device if ``ratio`` of all are on the host: the first parameters,
    and the first blocks of one more, as the norm counts blocks."""
    total = sum(numels)
    left = total - round(total * ratio)
    kept_numels = []
    for numel in numels:
        kept = numel if left >= numel else left // NORM_BLOCK_NUMEL * NORM_BLOCK_NUMEL
        left = left - kept if kept == numel else 0
        kept_numels.append(kept)
    return kept_numels


class Backend:
    """The tiles of one store that are kept in one memory and stepped by one set of kernels.

    Args:
        settings: see there.
        page_arrays: of each page.
        holds: of the store.
    """

    def __init__(self, settings: BackendSettings, page_arrays: int, holds: PageHolds) -> None:
        transfer, kernels, tile_numel, self._hold_gradients, speculation_memory = settings
        assert not transfer.staged or kernels.device.type == "cpu"
        self.transfer = transfer
        self.kernels = kernels
        self.tile_numel = tile_numel
        self._holds = holds
        # Grow with parameters.
        self.tiles: list[Tile] = []
        self.parts: dict[int, list[tuple[Tile, Segment]]] = {}
        """A parameter's tiles here, and its segments in them."""
        self._slab = SlotSlab(transfer)
        self._ring = SlotRing(transfer)
        """For gradients that do not stay, or for new parameters whose gradients have another dtype."""
        memory = allocator_on(kernels.device)
        self.pages = PagePool(page_arrays, memory, holds)
        # Change with each window. The worker's jobs never take the store's lock.
        self.accumulators = AccumulatorPool(memory)
        self._worker: JobRunner | None = None
        self.speculator = Speculator()
        if speculation_memory and self._hold_gradients and isinstance(kernels, HostKernels):
            spares = PagePool(page_arrays, memory, holds)
            parts_of = self.parts.__getitem__
            self.speculator = Ahead(speculation_memory, spares, transfer, kernels, self.worker, parts_of)
        self.snapshots = Snapshots(self.pages, holds, self.speculator, kernels.device)

    @property
    def worker(self) -> JobRunner:
        """Who adds later arrivals and steps ahead; made when there is something to do."""
        if self._worker is None:
            limit_bytes = max(4 * 4 * self.tile_numel, 1 << 24)
            self._worker = runner_for(self.kernels, limit_bytes, self.transfer.worker_delay)
        return self._worker

    @property
    def on_host(self) -> bool:
        """Whether pages are in host memory."""
        return self.kernels.device.type == "cpu"

    def add(self, tile: Tile) -> None:
        self.tiles.append(tile)
        for parameter, segment in tile.segments.items():
            self.parts.setdefault(parameter, []).append((tile, segment))

    def add_slots(self, added: Sequence[Tile]) -> None:
        """Make the staging memory that these new tiles need."""
        if not added or not self.transfer.staged:
            return
        passing = [tile.output_bytes for tile in added if not (self._hold_gradients and tile.outputs_fit)]
        if self._hold_gradients:
            for tile, slot in zip(added, self._slab.cut([tile.gradient_bytes for tile in added]), strict=True):
                tile.slot = slot
        else:
            for tile in self.tiles:
                tile.slot = None  # the ring may let go of it
        if passing:
            self._ring.grow(max(passing), min(PIPELINE_DEPTH, len(self.tiles)))

    def state_bytes(self) -> dict[str, int]:
        """By kind: pages, gradients (slots, or tensors held), spares, staging, accumulators."""
        held = 0 if self.transfer.staged else sum(tile.held_bytes() for tile in self.tiles)
        return {
            "pages": self.pages.allocated_bytes,
            "gradients": self._slab.allocated_bytes + held,
            "spares": self.speculator.spare_bytes,
            "staging": self._ring.allocated_bytes,
            "accumulators": self.accumulators.allocated_bytes,
        }

    # -- gradients ------------------------------------------------------------

    def bring(self, tile: Tile, segment: Segment, gradient: Tensor, ready: Any) -> None:
        """Take one more gradient of a segment into the window: the first is copied, each later one is added in float32.

        Returns at once: the copy runs on its stream, the addition on the worker. One caller at a time.
        """
        tile.arrived(segment)
        tile.recorder.mark(ARRIVE if segment.arrivals == 1 else ARRIVE_AGAIN, tile.layout.index)
        self.speculator.drop(tile)
        if segment.arrivals == 1:
            after = tile.slot.last_publish if tile.slot is not None else None
            segment.handle = self._copy(tile, segment, gradient, ready, after)
            segment.gradient = segment.handle.target
        else:
            self._queue_addition(tile, segment, gradient, ready)

    def _copy(self, tile: Tile, segment: Segment, gradient: Tensor, ready: Any, after: CopyHandle | None) -> CopyHandle:
        recorder = tile.recorder
        begin_ns = recorder.begin(COPY_TO_HOST, tile.layout.index)
        handle = self.transfer.copy_to_host(gradient, tile.slot_view(segment.layout), ready, after)
        recorder.copying(COPY_TO_HOST, tile.layout.index, handle, begin_ns)
        return handle

    def _queue_addition(self, tile: Tile, segment: Segment, gradient: Tensor, ready: Any) -> None:
        if tile.accumulator is None:
            tile.accumulator = self.accumulators.take(tile.layout.page_numel)
        window = tile.window
        num_bytes = gradient.numel() * gradient.element_size()

        def add() -> None:
            if tile.window == window:
                self._add(tile, segment, gradient, ready)

        self.worker.submit(add, num_bytes)

    def _add(self, tile: Tile, segment: Segment, gradient: Tensor, ready: Any) -> None:
        total = tile.accumulator_view(segment.layout)
        if not segment.summed:
            self.kernels.accumulate(total, segment.wait(), add=False)
            segment.summed, segment.gradient, segment.handle = True, total, None
        # The slot is free again: what it held is in the accumulator.
        handle = self._copy(tile, segment, gradient, ready, None)
        handle.wait()
        self.kernels.accumulate(total, handle.target, add=True)

    def drain(self) -> BaseException | None:
        """Wait for every arrival, and for what was stepped ahead; the first failure since the last call, if any."""
        failure = None if self._worker is None else self._worker.drain()
        self.speculator.harvest()
        return failure

    def block_sums(self, gradients: Mapping[int, Tensor | None], scale: Scale) -> dict[int, Sequence[float]]:
        """By parameter, the sums of squares of the blocks that are here; see :meth:`ParameterStore.sum_of_squares`."""
        known = self.speculator.known_squares(scale)
        measured = [parameter for parameter in gradients if parameter not in known and self.parts[parameter]]
        sums = self.kernels.block_sums([self._found(one, gradients[one]) for one in measured], scale)
        return {**known, **dict(zip(measured, sums, strict=True))}

    def _found(self, parameter: int, gradient: Tensor | None) -> list[Tensor]:
        parts = self.parts[parameter]
        if gradient is None:
            return [segment.wait() for _, segment in parts]
        first, last = parts[0][1].layout, parts[-1][1].layout
        return [self.transfer.read(gradient[first.parameter_offset : last.parameter_offset + last.numel])]

    # -- the step -------------------------------------------------------------

    def run(self, work: Sequence[tuple[Tile, Active]], scale: Scale, stepped: list[Tile]) -> None:
        """Step and publish all of it; on return the current stream sees the new parameters.

        What was stepped ahead is taken first: its copies to the device run while the others are stepped. ``stepped``
        gets the tiles that are COMMITTED, and on their way to the device.
        """
        if self._holds or self.snapshots.extended:
            self.snapshots.collect()
        ready = self.transfer.mark()
        self.transfer.begin_publish()
        remaining = [entry for entry in work if not self._take_stepped(*entry, scale, stepped)]
        for move, place in commit_moves(len(remaining), PIPELINE_DEPTH):
            tile, active = remaining[place]
            if move is Move.FINISH:
                self._finish(tile, active, scale, stepped)
                continue
            if self.transfer.staged and not self._hold_gradients:
                tile.slot = self._ring.next()
            self._fill(tile, active, ready)
        self.transfer.end_publish()

    def _take_stepped(self, tile: Tile, active: Active, scale: Scale, stepped: list[Tile]) -> bool:
        slot = self.speculator.verdict(tile, active, scale)
        if slot is None:
            return False
        stepped.append(tile)  # its page is the new one: from here on there is no way back
        for segment, step in active:
            output = slot.view(tile.dtype, segment.layout.page_offset, segment.layout.numel)
            slot.last_publish = self._publish(tile, output, segment.part_of(step.target))
        return True

    def _publish(self, tile: Tile, output: Tensor, target: Tensor) -> CopyHandle:
        begin_ns = tile.recorder.begin(PUBLISH, tile.layout.index)
        handle = self.transfer.copy_to_device(output, target)
        tile.recorder.copying(PUBLISH, tile.layout.index, handle, begin_ns)
        return handle

    def _fill(self, tile: Tile, active: Active, ready: Any) -> None:
        active.sort(key=lambda pair: pair[0].layout.page_offset)
        for segment, step in active:
            if step.gradient is not None:
                assert segment.arrivals == 0  # a second one would still be on its way to the worker
                self.bring(tile, segment, segment.part_of(step.gradient), ready)

    def _finish(self, tile: Tile, active: Active, scale: Scale, stepped: list[Tile]) -> None:
        targets, segment_steps = [], []
        if self.transfer.staged and not tile.outputs_fit:
            tile.output_slot = self._ring.next()
            if tile.output_slot.last_publish is not None:
                tile.output_slot.last_publish.wait()  # the kernel writes at once, on no stream
        for segment, step in active:
            target = segment.part_of(step.target)
            targets.append(target)
            output = self.transfer.output_for(target, tile.output_view(segment.layout))
            segment_steps.append(SegmentStep(segment, step.rule, output))
        if self._holds:
            with self.snapshots.page_for(tile) as into:
                commit_tile(tile, segment_steps, scale, self.kernels, into)
        else:
            commit_tile(tile, segment_steps, scale, self.kernels)
        stepped.append(tile)
        for segment_step, target in zip(segment_steps, targets, strict=True):
            handle = self._publish(tile, segment_step.output, target)
            slot = tile.output_slot or tile.slot
            if slot is not None:
                slot.last_publish = handle
        tile.output_slot = None

    def end_step(self, scale: Scale) -> None:
        """The window was stepped with ``scale``. It is over for what it held and did not step, too."""
        self.end_window([tile for tile in self.tiles if tile.state is TileState.COMMITTED], TileEvent.PUBLISHED)
        self.end_window([tile for tile in self.tiles if tile.state is not TileState.EMPTY], TileEvent.DISCARD)
        self.accumulators.trim()
        self.speculator.end_window(self.tiles, scale)

    def end_window(self, tiles: Iterable[Tile], event: TileEvent) -> None:
        for tile in tiles:
            tile.move(event)
            self.speculator.drop(tile)
            accumulator = tile.end_window(event is TileEvent.PUBLISHED)
            if accumulator is not None:
                self.accumulators.give_back(accumulator)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self.transfer.close()


def commit_tile(
    tile: Tile, steps: Sequence[SegmentStep], scale: Scale, kernels: Kernels, into: Tensor | None = None
) -> None:
    """FILLING or READY -> COMMITTED: the tile's page and the outputs hold the new values.

    With ``into`` that becomes the tile's page, and the one that it had is only read; otherwise it is stepped in place.

    Raises:
        BaseException: what the pass raised; the tile is then BROKEN.
    """
    for step in steps:
        if step.segment.handle is not None:
            step.segment.handle.wait()
    rows, rules = step_table(steps)
    page = tile.page
    assert page is not None
    target = page if into is None else into
    tile.move(TileEvent.COMMIT)
    recorder = tile.recorder
    begin_ns = recorder.begin(STEP_IN_PLACE, tile.layout.index)
    try:
        if into is not None:
            for part in idle_parts(tile, steps):  # idle means untouched, in either page
                into[:, part] = page[:, part]
        kernels.step_tile(page, target, rows, rules, scale)
    except BaseException:
        tile.move(TileEvent.COMMIT_FAILED)
        raise
    finally:
        recorder.passed(STEP_IN_PLACE, tile.layout.index, page, rows, begin_ns)
    tile.page = target
    tile.move(TileEvent.COMMIT_DONE)

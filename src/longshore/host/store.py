"""The host side of one optimizer: tiles, their pages, and the gradients of the window.

The store knows parameters by index, as flat tensors; groups, names and
``.grad`` are its caller's business.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from longshore.errors import GradientError
from longshore.host.arrivals import Arrivals
from longshore.host.holds import PageHolds
from longshore.host.memory import AccumulatorPool, PagePool, SlotRing, SlotSlab, allocator_on
from longshore.host.parameter_store import MASTER, ParameterStore
from longshore.host.pipeline import PIPELINE_DEPTH, Pipeline
from longshore.host.recorder import DISCARD, NO_RECORDER, NORM, Recorder
from longshore.host.snapshot import Read, Snapshot, Snapshots
from longshore.host.speculation import Ahead, SpeculationMemory
from longshore.host.speculator import Forecast, NoSpeculation, Speculator
from longshore.host.speculator import Record as SpeculationRecord
from longshore.host.stepping import ParameterStep
from longshore.host.tile import Segment, Tile
from longshore.host.tile_state import TileEvent, TileState
from longshore.host.worker import runner_for
from longshore.kernels import HostKernels, Kernels, Scale, total_of_blocks
from longshore.layout import plan_tiles
from longshore.transfer import Transfer


class HostStore(ParameterStore):
    """Pages, tiles, slots and the worker of one optimizer.

    Args:
        transfer: how bytes move; decides whether slots exist at all.
        kernels: what steps; pages and accumulators are where its tensors are.
        tile_numel: elements a tile.
        hold_gradients: gradients arrive during backward and stay until the
            step, so that every tile has a slot of its own; otherwise a few
            slots go round.
        gradient_dtype: of the gradients that arrive; None: the parameters' own.
        speculation_memory: for tiles that are stepped ahead of the verdict.
    """

    def __init__(
        self,
        transfer: Transfer,
        kernels: Kernels,
        tile_numel: int,
        hold_gradients: bool,
        gradient_dtype: torch.dtype | None = None,
        speculation_memory: SpeculationMemory = 0,
    ) -> None:
        assert not transfer.staged or kernels.device.type == "cpu"
        self.transfer = transfer
        self.kernels = kernels
        self._tile_numel = tile_numel
        self._hold_gradients = hold_gradients
        self._gradient_dtype = gradient_dtype
        # Changes when somebody traces.
        self._recorder: Recorder = NO_RECORDER
        # Grow with parameters.
        self._tiles: list[Tile] = []
        self._parts: dict[int, list[tuple[Tile, Segment]]] = {}
        self._slab = SlotSlab(transfer)
        self._ring = SlotRing(transfer)
        """For gradients that do not stay, or for new parameters whose gradients have another dtype."""
        memory = allocator_on(kernels.device)
        self._arrays: tuple[str, ...] = (MASTER,)
        holds = PageHolds()
        self._pages = PagePool(len(self._arrays), memory, holds)
        # Change with each window. Several autograd threads may bring gradients
        # of one tile; the worker's jobs never take the lock.
        self._lock = threading.Lock()
        self._accumulators = AccumulatorPool(memory)
        self._worker = runner_for(kernels, max(4 * 4 * tile_numel, 1 << 24), transfer.worker_delay)
        self._arrivals = Arrivals(transfer, kernels, self._accumulators, self._worker)
        self.speculator: Speculator = NoSpeculation()
        if speculation_memory and hold_gradients and isinstance(kernels, HostKernels):
            spares = PagePool(len(self._arrays), memory, holds)
            parts_of = self._parts.__getitem__
            self.speculator = Ahead(speculation_memory, spares, transfer, kernels, self._worker, parts_of)
        self._snapshots = Snapshots(self._pages, holds, self.speculator)
        self._incomplete: BaseException | None = None

    # -- layout ---------------------------------------------------------------

    @property
    def arrays(self) -> tuple[str, ...]:
        return self._arrays

    def set_states(self, states: Sequence[str]) -> None:
        arrays = (MASTER, *states)
        if arrays != self._arrays:
            rows = [arrays.index(name) for name in self._arrays]
            self._arrays = arrays
            self._drain()
            for tile in self._tiles:
                self.speculator.void(tile)
            self.speculator.set_arrays(len(arrays))
            self._pages.set_arrays(len(arrays))
            for tile in self._tiles:
                tile.widen_page(rows, self._pages)

    def add_parameters(self, parameters: Iterable[tuple[int, int, torch.dtype]]) -> None:
        """Lay out ``(index, numel, dtype)``; a tile holds parameters of one dtype."""
        by_dtype: dict[torch.dtype, list[tuple[int, int]]] = {}
        for index, numel, dtype in parameters:
            by_dtype.setdefault(dtype, []).append((index, numel))
            self._parts[index] = []
        added = []
        for dtype, members in by_dtype.items():
            for layout in plan_tiles(members, self._tile_numel, len(self._tiles)):
                tile = Tile(layout, dtype, self._gradient_dtype or dtype)
                tile.recorder = self._recorder
                added.append(tile)
                self._tiles.append(tile)
                for index, segment in tile.segments.items():
                    self._parts[index].append((tile, segment))
        if added and self.transfer.staged:
            self._add_slots(added)

    def _add_slots(self, added: list[Tile]) -> None:
        passing = [tile.output_bytes for tile in added if not (self._hold_gradients and tile.outputs_fit)]
        if self._hold_gradients:
            for tile, slot in zip(added, self._slab.cut([tile.gradient_bytes for tile in added]), strict=True):
                tile.slot = slot
        else:
            for tile in self._tiles:
                tile.slot = None  # the ring may let go of it
        if passing:
            self._ring.grow(max(passing), min(PIPELINE_DEPTH, len(self._tiles)))

    def __contains__(self, parameter: int) -> bool:
        return parameter in self._parts

    @property
    def tiles(self) -> Sequence[Tile]:
        return self._tiles

    def host_bytes(self) -> dict[str, int]:
        return self.state_bytes() if self.kernels.device.type == "cpu" else dict.fromkeys(self.state_bytes(), 0)

    def device_bytes(self) -> dict[str, int]:
        return {} if self.kernels.device.type == "cpu" else self.state_bytes()

    def state_bytes(self) -> dict[str, int]:
        """By kind, wherever they are: pages, gradients (slots, or tensors held), spares, staging, accumulators."""
        held = 0 if self.transfer.staged else sum(tile.held_bytes() for tile in self._tiles)
        return {
            "pages": self._pages.allocated_bytes,
            "gradients": self._slab.allocated_bytes + held,
            "spares": self.speculator.spare_bytes,
            "staging": self._ring.allocated_bytes,
            "accumulators": self._accumulators.allocated_bytes,
        }

    # -- the window -----------------------------------------------------------

    def arrive(self, parameter: int, gradient: Tensor) -> None:
        # Returns at once: the copy runs on the lane, a later arrival is added by the worker.
        self.check_usable()
        ready = self.transfer.mark()
        with self._lock:
            for tile, segment in self._parts[parameter]:
                self._arrive(tile, segment, segment.part_of(gradient), ready)
                self.speculator.consider(tile)

    def _arrive(self, tile: Tile, segment: Segment, gradient: Tensor, ready: Any) -> None:
        tile.arrived(segment)
        self.speculator.drop(tile)
        self._arrivals.bring(tile, segment, gradient, ready)

    def record(self, recorder: Recorder) -> None:
        with self._lock:
            self._recorder = recorder
            self._worker.working = lambda: recorder.working("host")
            for tile in self._tiles:
                tile.recorder = recorder

    def foresee(self, forecast: Forecast) -> None:
        self.speculator.forecast = forecast

    def expect_backwards(self, backwards: int) -> None:
        with self._lock:
            for tile in self._tiles:
                tile.expect(backwards)

    @property
    def speculation(self) -> SpeculationRecord | None:
        return self.speculator.record

    def arrivals(self, parameter: int) -> int:
        parts = self._parts.get(parameter)
        return parts[0][1].arrivals if parts else 0  # all have as many

    def end_backward(self, failure: BaseException | None) -> None:
        self._incomplete = self._incomplete or failure

    def reduced(self, parameter: int) -> int:
        return min((segment.arrivals for _, segment in self._parts[parameter]), default=0)

    def settle(self) -> None:
        """Wait until every arrival is on the host and added; raises GradientError where the window is incomplete."""
        self.check_usable()
        self._drain()
        if isinstance(failure := self._incomplete, GradientError):
            raise failure
        if failure is not None:
            raise GradientError(
                f"a gradient could not be added on the host ({failure}); zero_grad() discards this window, and "
                "training can go on"
            ) from failure

    def _drain(self) -> None:
        # The worker reports a failure once; the window stays incomplete until it is discarded.
        failure = self._worker.drain()
        self._incomplete = self._incomplete or failure
        self.speculator.harvest()

    def discard(self, parameter: int | None = None) -> None:
        self.check_usable()
        with self._lock:
            self._drain()
            if parameter is None:
                self._end_window(self._tiles, TileEvent.DISCARD)
                self.speculator.end_window(self._tiles, None)
                self._incomplete = None
                self._recorder.mark(DISCARD, None)
                return
            for tile, segment in self._parts[parameter]:
                if tile.forget(segment) == 0:
                    self._end_window([tile], TileEvent.DISCARD)
                self.speculator.drop(tile)

    def sum_of_squares(self, gradients: Mapping[int, Tensor | None], scale: Scale) -> float:
        return total_of_blocks(self.block_sums(gradients, scale).values())

    def block_sums(self, gradients: Mapping[int, Tensor | None], scale: Scale) -> dict[int, Sequence[float]]:
        """By parameter, the sums of squares of its blocks; waits for all arrivals.

        The arguments are those of :meth:`sum_of_squares`.
        """
        begin_ns = self._recorder.begin(NORM, None)
        self.speculator.hold()
        try:
            self.settle()
            known = self.speculator.known_squares(scale)
            pieces = {
                parameter: [segment.wait() for _, segment in self._parts[parameter]]
                if gradient is None
                else [self.transfer.read(gradient)]
                for parameter, gradient in gradients.items()
                if parameter not in known
            }
            measured = dict(zip(pieces, self.kernels.block_sums(list(pieces.values()), scale), strict=True))
        finally:
            self.speculator.resume()
            self._recorder.span(NORM, None, begin_ns)
        return {one: known[one] if one in known else measured[one] for one in gradients}

    def commit(self, steps: Mapping[int, ParameterStep], scale: Scale, then: Callable[[], None] = lambda: None) -> None:
        """Step every parameter in ``steps``, tile by tile, and end the window.

        Gradients come down, tiles are stepped and new values go up at the same
        time. On return the current stream sees the new parameters. ``then`` does
        the caller's own bookkeeping; where it fails, the commit has failed.

        Raises:
            GradientError: see :meth:`settle`; nothing was stepped.
            BrokenStateError: this or an earlier commit failed half way.
        """
        self.settle()
        work: dict[int, list[tuple[Segment, ParameterStep]]] = {}
        for parameter, step in steps.items():
            for tile, segment in self._parts[parameter]:
                work.setdefault(tile.layout.index, []).append((segment, step))
        self._snapshots.collect()
        hold, ring = self._hold_gradients, self._ring
        line = Pipeline(self.transfer, self.kernels, ring, hold, self._arrive, self.speculator, self._snapshots)
        try:
            line.run([(self._tiles[index], work[index]) for index in sorted(work)], scale)
            self._end_window(line.stepped, TileEvent.PUBLISHED)
            # The window is over for what it held and did not step, too.
            self._end_window([tile for tile in self._tiles if tile.state is not TileState.EMPTY], TileEvent.DISCARD)
            self._accumulators.trim()
            self.speculator.end_window(self._tiles, scale)
            then()
        except BaseException as failure:
            # Ctrl-C lands here too.
            brought = [parameter for parameter, step in steps.items() if step.gradient is not None]
            self._abandon(failure, brought, begun=bool(line.stepped))
            raise

    def _abandon(self, failure: BaseException, brought: list[int], begun: bool) -> None:
        """A commit failed. If it had stepped anything, the store is broken; otherwise nothing is
        lost, and the gradients that this commit brought are let go of: they are still ``.grad``."""
        stepping = (TileState.COMMITTING, TileState.COMMITTED, TileState.BROKEN)
        if begun or any(tile.state in stepping for tile in self._tiles):
            self._broken = failure
            # What is on its way to the device arrives before what the user loads there next.
            with contextlib.suppress(Exception):
                self.transfer.end_publish()
            return
        for parameter in brought:
            self.discard(parameter)

    def _end_window(self, tiles: Iterable[Tile], event: TileEvent) -> None:
        for tile in tiles:
            tile.move(event)
            self.speculator.drop(tile)
            accumulator = tile.end_window(event is TileEvent.PUBLISHED)
            if accumulator is not None:
                self._accumulators.give_back(accumulator)

    # -- optimizer state ------------------------------------------------------

    def begin_load(self) -> None:
        with self._lock:
            self._drain()
            self._end_window(self._tiles, TileEvent.LOAD)
            self._accumulators.trim()
            self.speculator.end_window(self._tiles, None)
            self._incomplete = self._broken = None

    def _void(self, parameter: int) -> None:
        # The parameter's pages or gradient are about to be written.
        self._drain()
        for tile, _ in self._parts.get(parameter, ()):
            self.speculator.void(tile)
            self._snapshots.make_writable(tile)

    def snapshot(self, reads: Sequence[Read], memory_bytes: int) -> Snapshot:
        self.check_usable()
        self._drain()
        return self._snapshots.take(self._arrays, self._parts, reads, memory_bytes)

    def adopt(self, parameter: int, values: Tensor, *, keep_matching: bool) -> None:
        self.check_usable()
        self._void(parameter)
        for tile, segment in self._parts[parameter]:
            tile.have_page(self._pages)
            master = tile.page_view(segment.layout, 0)
            host = self._read(values, segment)
            if keep_matching:
                self.kernels.reconcile(master, host, adopt=True)
            else:
                self.kernels.accumulate(master, host, add=False)

    def count_differing(self, parameter: int, values: Tensor) -> int:
        self.check_usable()
        return sum(
            self.kernels.reconcile(tile.page_view(segment.layout, 0), self._read(values, segment), adopt=False)
            for tile, segment in self._parts[parameter]
        )

    def read_state(self, parameter: int, which: str) -> Tensor:
        self.check_usable()
        row, parts = self._arrays.index(which), self._parts[parameter]
        # States may have been set by their numbers alone, before the first step.
        pieces = [tile.have_page(self._pages)[row, segment.layout.in_page] for tile, segment in parts]
        return torch.cat(pieces).cpu() if pieces else torch.empty(0, dtype=torch.float32, device="cpu")

    def read_gradient(self, parameter: int) -> Tensor | None:
        self.settle()
        pieces = [segment.wait().float() for _, segment in self._parts[parameter] if segment.arrivals > 0]
        return torch.cat(pieces).cpu() if pieces else None

    def write_gradient(self, parameter: int, values: Tensor) -> None:
        self.settle()
        self._void(parameter)
        for _, segment in self._parts[parameter]:
            segment.wait().copy_(segment.part_of(values))

    def write_state(self, parameter: int, which: str, values: Tensor) -> None:
        self.check_usable()
        self._void(parameter)
        row = self._arrays.index(which)
        for tile, segment in self._parts[parameter]:
            tile.have_page(self._pages)
            tile.page_view(segment.layout, row).copy_(segment.part_of(values))

    def clear_state(self, parameter: int) -> None:
        self._void(parameter)
        for tile, segment in self._parts.get(parameter, ()):
            if tile.page is not None:  # one that never was is zero already
                tile.rows(segment.layout).zero_()

    def _read(self, values: Tensor, segment: Segment) -> Tensor:
        return self.transfer.read(segment.part_of(values))

    def close(self) -> None:
        self._worker.close()
        self.transfer.close()

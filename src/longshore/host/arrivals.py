"""How a gradient comes to its tile: the first of a window is copied, each later one is added in float32."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from longshore.host.memory import AccumulatorPool
from longshore.host.recorder import COPY_TO_HOST
from longshore.host.tile import Segment, Tile
from longshore.host.worker import JobRunner
from longshore.kernels import Kernels
from longshore.transfer import CopyHandle, Transfer


class Arrivals:
    """Brings gradients down for one store.

    Args:
        transfer: how bytes move.
        kernels: what adds.
        accumulators: for tiles that get a second gradient.
        worker: runs the additions.
    """

    def __init__(self, transfer: Transfer, kernels: Kernels, accumulators: AccumulatorPool, worker: JobRunner) -> None:
        self._transfer = transfer
        self._kernels = kernels
        self._accumulators = accumulators
        self._worker = worker

    def bring(self, tile: Tile, segment: Segment, gradient: Tensor, ready: Any) -> None:
        """Copy or add the gradient of an arrival that is counted already. Returns at once: the copy runs on
        the lane, the addition on the worker. One caller at a time."""
        if segment.arrivals == 1:
            after = tile.slot.last_publish if tile.slot is not None else None
            segment.handle = self._copy(tile, segment, gradient, ready, after)
            segment.gradient = segment.handle.target
        else:
            self._queue_addition(tile, segment, gradient, ready)

    def _copy(self, tile: Tile, segment: Segment, gradient: Tensor, ready: Any, after: CopyHandle | None) -> CopyHandle:
        recorder = tile.recorder
        begin_ns = recorder.begin(COPY_TO_HOST, tile.layout.index)
        handle = self._transfer.copy_to_host(gradient, tile.slot_view(segment.layout), ready, after)
        recorder.copying(COPY_TO_HOST, tile.layout.index, handle, begin_ns)
        return handle

    def _queue_addition(self, tile: Tile, segment: Segment, gradient: Tensor, ready: Any) -> None:
        if tile.accumulator is None:
            tile.accumulator = self._accumulators.take(tile.layout.page_numel)
        window = tile.ticket.window
        num_bytes = gradient.numel() * gradient.element_size()

        def add() -> None:
            if tile.ticket.window == window:
                self._add(tile, segment, gradient, ready)

        self._worker.submit(add, num_bytes)

    def _add(self, tile: Tile, segment: Segment, gradient: Tensor, ready: Any) -> None:
        total = tile.accumulator_view(segment.layout)
        if not segment.summed:
            self._kernels.accumulate(total, segment.wait(), add=False)
            segment.summed, segment.gradient, segment.handle = True, total, None
        # The slot is free again: what it held is in the accumulator.
        handle = self._copy(tile, segment, gradient, ready, None)
        handle.wait()
        self._kernels.accumulate(total, handle.target, add=True)

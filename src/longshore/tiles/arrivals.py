"""Arrivals: gradients of a window on their way into one tier's memory, and the sums of several of one parameter."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from longshore.accelerator import Mark
from longshore.kernels import Kernels
from longshore.layout.memory import LANDING_SLOTS
from longshore.layout.tiles import padded_bytes
from longshore.tiles.events import ADD, ARRIVE, ARRIVE_AGAIN, COPY_TO_HOST
from longshore.tiles.memory import BufferKind, BufferPool
from longshore.tiles.parcels import Entry, Parcel, Waiting
from longshore.tiles.slots import Slot, cut_slots
from longshore.tiles.tile import Segment, Tile
from longshore.transfer import Bundle, Copy, CopyStreams
from longshore.transfer.runner import JobRunner


@dataclass(eq=False)
class _Addition:
    """A later gradient on its way to the sum of its segment: copied to a landing slot, then added by the worker.

    ``withdrawn``: it never reached the worker.
    """

    tile: Tile
    segment: Segment
    entry: Entry
    window: int
    withdrawn: bool = False
    copied: Copy | None = None
    slot: Slot | None = None
    free: deque[Slot] = field(default_factory=deque)
    """Where its slot came from."""

    @property
    def due(self) -> bool:
        return not self.withdrawn and self.tile.window == self.window


class Arrivals:
    """Gradients on their way in: the first of each segment is copied, each later one is added in float32.

    Args:
        streams: copies them.
        kernels: add them.
        sums: memory for the sums.
        worker: runs the additions.
    """

    def __init__(self, streams: CopyStreams, kernels: Kernels, sums: BufferPool, worker: JobRunner) -> None:
        self._streams = streams
        self._kernels = kernels
        self._sums = sums
        self._worker = worker
        self._landing_bytes = 0
        self._landing: deque[Slot] = deque()
        """Slots that no later gradient is in or on its way to. The worker gives them back."""
        self._queued: deque[_Addition] = deque()
        """Later gradients that wait for a slot, in their order, which is that of the worker."""
        # The thread that brings gradients lands them, and so does the worker.
        self._lock = threading.Lock()
        self._waiting = Waiting(streams.most_together)

    @property
    def slot_bytes(self) -> int:
        return LANDING_SLOTS * self._landing_bytes

    def make_slots(self, num_bytes: int) -> None:
        """Make sure that later gradients of tiles of ``num_bytes`` have slots."""
        slot_bytes = padded_bytes(num_bytes)
        if slot_bytes > self._landing_bytes:
            slots, _ = cut_slots(self._streams, [slot_bytes] * LANDING_SLOTS)
            with self._lock:
                self._landing, self._landing_bytes = deque(slots), slot_bytes

    def bring(self, tile: Tile, segment: Segment, gradient: Tensor, ready: Sequence[Mark]) -> None:
        """Take one more gradient of a segment into the window.

        This returns at once: the copy runs on its stream, the addition on the worker. One thread may call at a time.
        """
        self.count(tile, segment)
        if segment.arrivals > 1:
            self._queue_addition(tile, segment, Entry(segment.place, segment.layout, gradient, ready))
        else:
            self.copy(tile, segment, gradient, ready)

    def count(self, tile: Tile, segment: Segment) -> None:
        """Count one more gradient of a segment."""
        tile.arrived(segment)
        tile.recorder.mark(ARRIVE if segment.arrivals == 1 else ARRIVE_AGAIN, tile.layout.index)

    def copy(self, tile: Tile, segment: Segment, gradient: Tensor, ready: Sequence[Mark]) -> None:
        """Copy all that has arrived of a segment so far: its first gradient, or the float32 sum of several."""
        entry = Entry(segment.place, segment.layout, gradient, ready)
        slot = tile.slot_for(gradient)
        if slot is None or not entry.travels_with_others:
            segment.handle = self._copy(tile, entry, slot)
            segment.gradient = segment.handle.target
        else:
            segment.handle = self._parcel(tile, entry)
            segment.gradient = slot.view(tile.dtype_in(slot), entry.segment)
        segment.summed = slot is not None and slot is tile.sum_slot

    def _parcel(self, tile: Tile, entry: Entry) -> Parcel:
        """Add a gradient to the tile's parcel, or to a new one if that is on its way."""
        if tile.parcel is None or not tile.parcel.add(entry):
            tile.parcel = Parcel(tile.small_expected, self._waiting, partial(self._copy_run, tile))
            tile.parcel.add(entry)
        return tile.parcel

    def _copy(self, tile: Tile, entry: Entry, slot: Slot | None) -> Copy:
        into = after = None
        if slot is not None:
            into, after = slot.view(tile.dtype_in(slot), entry.segment), slot.last_publish
        recorder = tile.recorder
        begin_ns = recorder.begin(COPY_TO_HOST, tile.layout.index)
        handle = self._streams.stage(entry.gradient, into, entry.ready, after)
        recorder.copying(COPY_TO_HOST, tile.layout.index, handle, begin_ns)
        return handle

    def _copy_run(self, tile: Tile, run: Sequence[Entry]) -> list[Copy]:
        """Copy gradients of neighbors, and sums."""
        alike = itertools.groupby(run, lambda entry: tile.slot_for(entry.gradient))
        return [copy for slot, entries in alike if slot is not None for copy in self._together(tile, slot, [*entries])]

    def _together(self, tile: Tile, slot: Slot, run: Sequence[Entry]) -> list[Copy]:
        """Copy neighbors together, if the device has memory to gather them."""
        if len(run) == 1:
            return [self._copy(tile, run[0], slot)]
        into, offsets = slot.view_of_run(tile.dtype_in(slot), [entry.segment for entry in run])
        bundle = Bundle([(entry.gradient, offset) for entry, offset in zip(run, offsets, strict=True)])
        ready = [mark for entry in run for mark in entry.ready]
        recorder = tile.recorder
        begin_ns = recorder.begin(COPY_TO_HOST, tile.layout.index)
        try:
            handles = [self._streams.stage(bundle, into, ready, slot.last_publish)]
        except torch.OutOfMemoryError:
            handles = [self._copy(tile, entry, slot) for entry in run[:-1]]
            into = slot.view(tile.dtype_in(slot), run[-1].segment)
            handles.append(self._streams.stage(run[-1].gradient, into, run[-1].ready, slot.last_publish))
        recorder.copying(COPY_TO_HOST, tile.layout.index, handles[-1], begin_ns)
        return handles

    def _queue_addition(self, tile: Tile, segment: Segment, entry: Entry) -> None:
        if tile.sums is None:
            sums = self._sums.take(BufferKind(tile.layout.buffer_numel, 1))
            assert isinstance(sums, Tensor)
            tile.sums = sums
        segment.adding = True
        addition = _Addition(tile, segment, entry, tile.window)
        try:
            if self._landing_bytes:
                self._queued.append(addition)
                self._land()
            self._worker.submit(partial(self._add, addition), entry.gradient.nbytes)
        except BaseException:  # Ctrl-C, too
            addition.withdrawn = True
            self._give_back(addition)
            raise

    def _land(self) -> None:
        """Begin the copies of the oldest later gradients, as far as there are slots."""
        with self._lock:
            while self._landing and self._queued:
                addition = self._queued.popleft()
                if addition.due:
                    addition.free, addition.slot = self._landing, self._landing.popleft()
                    with contextlib.suppress(Exception):  # it is told when its turn to be added comes
                        addition.copied = self._copy(addition.tile, addition.entry, addition.slot)

    def _give_back(self, addition: _Addition) -> None:
        with self._lock:
            if addition.slot is not None:
                addition.free.append(addition.slot)
                addition.slot = None

    def _add(self, addition: _Addition) -> None:
        """Add a later gradient to its sum, on the worker."""
        try:
            if addition.due:
                self._add_now(addition)
        finally:
            self._give_back(addition)
            self._land()  # the next one is copied while the one in the other slot is added

    def _add_now(self, addition: _Addition) -> None:
        tile, segment, copied = addition.tile, addition.segment, addition.copied
        total = tile.sum_of(segment)
        if copied is None:
            if tile.slot is not None and not segment.summed:  # which frees the tile's slot
                self._kernels.accumulate(total, segment.wait(), add=False)
                segment.sum_is(total)
            copied = self._copy(tile, addition.entry, tile.slot)
        first = segment.wait()
        copied.wait()
        recorder = tile.recorder
        begin_ns = recorder.begin(ADD, tile.layout.index)
        if segment.summed:
            self._kernels.accumulate(total, copied.target, add=True)
        else:
            self._kernels.sum_of_two(total, first, copied.target)
            segment.sum_is(total)
        recorder.span(ADD, tile.layout.index, begin_ns)

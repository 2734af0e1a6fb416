"""Arrivals: gradients of a window on their way into one tier's memory, and the sums of several of one parameter.

Sums are made on the device or on the host. On the device gradients stay where they were computed until the last one has
arrived: the first is kept, and later ones are added to it in float32, in the order of arrival, which gives the bits of
the host's sums. Only the sum is copied then. Which gradient is the last is a forecast, and a wrong one costs time and
changes no bit: a sum that left is continued on the host, and one that is still there leaves before the step.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from longshore.accelerator import Mark, memory_of
from longshore.byte_sizes import format_byte_size
from longshore.errors import GradientError
from longshore.kernels import Kernels
from longshore.layout.memory import LANDING_SLOTS
from longshore.layout.tiles import padded_bytes
from longshore.tiles.events import ADD, ARRIVE, ARRIVE_AGAIN, COPY_TO_HOST
from longshore.tiles.memory import BufferKind, BufferPool, Slot, cut_slots
from longshore.tiles.tile import Arrival, CoalescedCopy, Segment, Tile, Waiting
from longshore.transfer import Bundle, Copy, CopyStreams
from longshore.transfer.runner import JobRunner

Accumulate = Literal["auto", "device", "host"]

_SUM_BYTES = torch.float32.itemsize


@dataclass
class Kept:
    """The gradient of a parameter that stays on the device, or the sum of several.

    Attributes:
        values: flat, in the gradient's dtype; a sum is float32.
        ready: position from which on they are valid.
        stream: the stream on which they were computed; None where the host computes them.
        version: how often torch had seen them written.
        summed: whether this is a sum.
    """

    values: Tensor
    ready: Sequence[Mark]
    stream: object
    version: int
    summed: bool = False


class DeviceSums:
    """The gradients of one tier that stay on the device, by parameter. One thread may call a method at a time.

    Args:
        streams: those of the tier.
        accumulate: ``"device"``: every gradient stays that is not known to be the only one of its window; ``"auto"``:
            those of parameters that had several in the last window, while the device has room; ``"host"``: none.
    """

    RESERVED = 16
    """With ``"auto"``, one part in so many of the device's memory stays free."""

    def __init__(self, streams: CopyStreams, accumulate: Accumulate) -> None:
        self._streams = streams
        # A simulated transfer has no device whose room could be asked for.
        asks_nobody = accumulate == "auto" and streams.device.type == "cpu"
        self._accumulate = "host" if asks_nobody or not streams.staged else accumulate
        self._kept: dict[int, Kept] = {}
        self._room_bytes: float = math.inf if accumulate == "device" else 0
        self._shown_bytes: float = math.inf
        """Bytes that fitted where an allocation failed: there is room for no more."""
        self._reserved_bytes = 0
        """Bytes of the sums that there will be in this window."""
        self.num_bytes = self._most_bytes = 0
        """Bytes of what is here, and the most in this window."""
        self._peak_bytes = self._others_bytes = 0
        """The most that all tensors of the device took so far, and of that what others than these took."""

    @property
    def text(self) -> str:
        """Where several gradients of a window are added, in words."""
        if self._accumulate == "host":
            return "on the host"
        if self._accumulate == "device":
            return "on the device"
        room = format_byte_size(max(0, int(min(self._room_bytes, self._shown_bytes))))
        return f"on the device while it has room (for {room} now, known after a window with several), else on the host"

    def __contains__(self, parameter: int) -> bool:
        return parameter in self._kept

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._kept))

    def __bool__(self) -> bool:
        return bool(self._kept)

    def isdisjoint(self, parameters: Iterable[int]) -> bool:
        """Return whether none of these parameters has a gradient here."""
        return self._kept.keys().isdisjoint(parameters)

    def has_room(self, numel: int, expected: int) -> bool:
        """Return whether the first gradient of a parameter is to stay; ``expected``: how many are expected, 0 if that
        is not known."""
        if expected == 1 or (expected == 0 and self._accumulate != "device"):
            return False
        return self._reserved_bytes + _SUM_BYTES * numel <= min(self._room_bytes, self._shown_bytes)

    def keep(self, parameter: int, gradient: Tensor, ready: Sequence[Mark]) -> None:
        """Keep the first gradient of a parameter, flat, which autograd does not know."""
        self._kept[parameter] = Kept(gradient, ready, self._streams.stream(), gradient._version)
        self._reserved_bytes += _SUM_BYTES * gradient.numel()
        self._count(gradient.nbytes)

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._most_bytes = max(self._most_bytes, self.num_bytes)

    def add(self, parameter: int, gradient: Tensor) -> bool:
        """Add a later gradient on the current stream; return False, and change nothing, if there is no memory for the
        sum.

        Raises:
            GradientError: see :meth:`checked`.
        """
        kept, stream = self.checked(parameter), self._streams.stream()
        if stream != kept.stream:
            self._streams.follow(kept.ready, kept.values)
        before = kept.values.nbytes
        try:
            if kept.summed:
                kept.values.add_(gradient)
            elif kept.values.dtype == torch.float32:
                kept.values = kept.values + gradient
            else:
                kept.values = kept.values.float().add_(gradient)
        except torch.OutOfMemoryError:
            self._shown_bytes = self._reserved_bytes - _SUM_BYTES * gradient.numel()
            return False
        self._count(kept.values.nbytes - before)
        kept.ready, kept.stream, kept.summed = self._streams.mark(), stream, True
        kept.version = kept.values._version
        return True

    def checked(self, parameter: int) -> Kept:
        """Return a parameter's gradient. Raises GradientError if it was written since it came."""
        kept = self._kept[parameter]
        if kept.values._version != kept.version:
            raise GradientError(
                "a gradient was written after backward had brought it, through a tensor that a hook had kept: it stays "
                "on the device, where others of the same step are added to it. Call zero_grad() to discard this "
                "window, and change gradients in tensor hooks (Tensor.register_hook), or let the host add "
                "(accumulate='host'), which copies them at once"
            )
        return kept

    def may_leave(self, parameter: int, parts: Iterable[tuple[Tile, Segment]]) -> bool:
        """Return whether a gradient is here for which there is memory on the host to which a hook may copy it."""
        kept = self._kept.get(parameter)
        return kept is not None and (not kept.summed or all(tile.takes_sums for tile, _ in parts))

    def sums(self) -> list[int]:
        """Return the parameters of which there are sums."""
        return [parameter for parameter, kept in self._kept.items() if kept.summed]

    def pop(self, parameter: int) -> None:
        """Let go of a parameter's gradient, if it is here."""
        kept = self._kept.pop(parameter, None)
        if kept is not None:
            self._reserved_bytes -= _SUM_BYTES * kept.values.numel()
            self.num_bytes -= kept.values.nbytes

    def clear(self) -> None:
        """Drop all gradients."""
        self._kept.clear()
        self._reserved_bytes = self.num_bytes = 0

    def end_window(self, several: bool) -> None:
        """With ``"auto"``, find out how much room the device has, once there were ``several`` gradients in a window."""
        if self._accumulate != "auto" or not (several or self._peak_bytes):
            return
        try:
            most_bytes, peak_bytes = memory_of(self._streams.device)
        except (AttributeError, RuntimeError):  # a device that cannot say it; the step is done
            self._accumulate = "host"
            return
        if peak_bytes > self._peak_bytes:
            self._others_bytes = max(self._others_bytes, peak_bytes - self._most_bytes)
        self._peak_bytes, self._most_bytes = peak_bytes, 0
        self._room_bytes = most_bytes - most_bytes // self.RESERVED - self._others_bytes


@dataclass(eq=False)
class _Addition:
    """A later gradient on its way to the sum of its segment: copied to a landing slot, then added by the worker.

    ``withdrawn``: it never reached the worker.
    """

    tile: Tile
    segment: Segment
    entry: Arrival
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
        self.had_several = False
        """Whether this window had several gradients of one parameter."""

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
            self._queue_addition(tile, segment, Arrival(segment.place, segment.layout, gradient, ready))
        else:
            self.copy(tile, segment, gradient, ready)

    def count(self, tile: Tile, segment: Segment) -> None:
        """Count one more gradient of a segment."""
        tile.arrived(segment)
        self.had_several |= segment.arrivals > 1
        tile.recorder.mark(ARRIVE if segment.arrivals == 1 else ARRIVE_AGAIN, tile.layout.index)

    def copy(self, tile: Tile, segment: Segment, gradient: Tensor, ready: Sequence[Mark]) -> None:
        """Copy all that has arrived of a segment so far: its first gradient, or the float32 sum of several."""
        entry = Arrival(segment.place, segment.layout, gradient, ready)
        slot = tile.slot_for(gradient)
        if slot is None and tile.slot is not None:  # there is no pinned memory for sums
            total = self._have_sums(tile)[0, segment.layout.in_buffer]
            segment.handle = self._stage(tile, entry, total, None)
            segment.gradient, segment.summed = total, True
            return
        if slot is None or not entry.travels_with_others:
            segment.handle = self._copy(tile, entry, slot)
            segment.gradient = segment.handle.target
        else:
            segment.handle = self._coalesced(tile, entry)
            segment.gradient = slot.view(tile.dtype_in(slot), entry.segment)
        segment.summed = slot is not None and slot is tile.sum_slot

    def _coalesced(self, tile: Tile, entry: Arrival) -> CoalescedCopy:
        """Add a gradient to the tile's coalesced copy, or to a new one if that is on its way."""
        if tile.coalesced is None or not tile.coalesced.add(entry):
            tile.coalesced = CoalescedCopy(tile.small_expected, self._waiting, partial(self._copy_run, tile))
            tile.coalesced.add(entry)
        return tile.coalesced

    def _copy(self, tile: Tile, entry: Arrival, slot: Slot | None) -> Copy:
        into = after = None
        if slot is not None:
            into, after = slot.view(tile.dtype_in(slot), entry.segment), slot.last_publish
        return self._stage(tile, entry, into, after)

    def _stage(self, tile: Tile, entry: Arrival, into: Tensor | None, after: Copy | None) -> Copy:
        recorder = tile.recorder
        begin_ns = recorder.begin(COPY_TO_HOST, tile.layout.index)
        handle = self._streams.stage(entry.gradient, into, entry.ready, after)
        recorder.copying(COPY_TO_HOST, tile.layout.index, handle, begin_ns)
        return handle

    def _copy_run(self, tile: Tile, run: Sequence[Arrival]) -> list[Copy]:
        """Copy gradients of neighbors, and sums."""
        alike = itertools.groupby(run, lambda entry: tile.slot_for(entry.gradient))
        return [copy for slot, entries in alike if slot is not None for copy in self._together(tile, slot, [*entries])]

    def _together(self, tile: Tile, slot: Slot, run: Sequence[Arrival]) -> list[Copy]:
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

    def _have_sums(self, tile: Tile) -> Tensor:
        if tile.sums is None:
            sums = self._sums.take(BufferKind(tile.layout.buffer_numel, 1))
            assert isinstance(sums, Tensor)
            tile.sums = sums
        return tile.sums

    def _queue_addition(self, tile: Tile, segment: Segment, entry: Arrival) -> None:
        self._have_sums(tile)
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

"""Memory of a tier: pools for optimizer state and for sums of gradients, and slots, in which gradients come in and new
parameters go out."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longshore.byte_sizes import format_byte_size
from longshore.errors import HostMemoryError
from longshore.kernels import Buffer, format_of, new_buffer
from longshore.layout.formats import StateFormat
from longshore.layout.tiles import SegmentLayout, padded_bytes
from longshore.transfer import Copy, CopyStreams, allocate_private

_LARGEST_BLOCK_BYTES = 1 << 30


def allocate_zeros(numel: int) -> Tensor:
    """Allocate float32 zeros that take memory only as they are touched, and that forked processes do not get.

    Raises:
        HostMemoryError: the system gives no such memory.
    """
    try:
        return allocate_private(4 * numel).view(torch.float32)
    except (OSError, RuntimeError, MemoryError) as error:  # of mmap; of torch
        raise HostMemoryError(
            f"the optimizer's state needs {format_byte_size(4 * numel)} more of host memory, which the system does not "
            f"give ({error}): raise the limit of the process (ulimit -v) or free memory, and call again; or need less, "
            "with another format of states or more ranks"
        ) from error


def allocator_on(device: torch.device) -> Callable[[int], Tensor]:
    """Return a function that makes ``numel`` float32 zeros, flat, on ``device``."""
    if device.type == "cpu":
        return allocate_zeros
    return lambda numel: torch.zeros(numel, dtype=torch.float32, device=device)


class PendingReads:
    """Buffers that must not change, because a snapshot has not read them yet.

    The training thread adds buffers, and moves tiles to other buffers; the reading thread releases the buffers.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._unread: set[int] = set()
        """Addresses of the buffers."""
        self.released = 0
        """Number of releases so far."""

    def __contains__(self, buffer: Buffer) -> bool:
        return buffer.data_ptr() in self._unread

    def __bool__(self) -> bool:
        return bool(self._unread)

    def add(self, buffers: Iterable[Buffer]) -> None:
        with self._changed:
            self._unread.update(buffer.data_ptr() for buffer in buffers)

    def release(self, buffer: Buffer) -> None:
        """Record that the buffer has been read. Any thread may call this method."""
        with self._changed:
            self._unread.discard(buffer.data_ptr())
            self.released += 1
            self._changed.notify_all()

    def wait_for(self, released: int) -> None:
        """Wait until :attr:`released` differs from this number."""
        with self._changed:
            self._changed.wait_for(lambda: self.released != released)


class BufferKind(NamedTuple):
    """The properties that determine the memory of a tile's buffer."""

    numel: int
    arrays: int
    """Number of arrays, with the master."""
    format: StateFormat = StateFormat.FP32
    own_master: bool = False
    """Whether parameters are their own masters, which the buffer lacks."""

    @property
    def num_bytes(self) -> int:
        return self.format.buffer_bytes(self.arrays, self.numel, self.own_master)


_Sort = tuple[StateFormat, int, int, bool]


def _sort_of(format: StateFormat, arrays: int, numel: int, own_master: bool) -> _Sort:
    """Return the sort of buffers that can take each other's place: float32 arrays are alike, whether one of
    them is a master or not."""
    return format, arrays, numel, own_master and format is not StateFormat.FP32


def _sort_of_kind(kind: BufferKind) -> _Sort:
    return _sort_of(kind.format, kind.arrays - kind.own_master, kind.numel, kind.own_master)


class BufferPool:
    """Pool of buffers by kind: ``[arrays, numel]``, the master and the states of the rule; for parameters that are
    their own masters, the states alone.

    A buffer that comes back is handed out again with its contents: the caller writes all elements that it reads, or
    asks for zeros. The sums of a tile with several gradients in a window are float32 and have one array.

    Args:
        allocate: makes flat zeros; see :func:`allocator_on`.
        pending_reads: buffers in it are handed out again only after they have been read; None: there are none.
    """

    def __init__(
        self, allocate: Callable[[int], Tensor] = allocate_zeros, pending_reads: PendingReads | None = None
    ) -> None:
        self.allocated_bytes = 0
        self._allocate = allocate
        self._pending_reads = pending_reads
        self._sorts: set[_Sort] = set()
        """Sorts of buffers that were taken, and not forgotten since."""
        self._free: dict[_Sort, list[Buffer]] = {}
        self._idle: dict[_Sort, list[Buffer]] = {}
        """Buffers that were free at the last :meth:`trim` and have not been taken since."""
        self.unread: list[Buffer] = []
        """Buffers that came back before a snapshot had read them."""

    def take(self, kind: BufferKind) -> Buffer:
        buffer = self.take_within(kind, sys.maxsize)
        assert buffer is not None
        return buffer

    def take_zeros(self, kind: BufferKind) -> Buffer:
        before = self.allocated_bytes
        buffer = self.take(kind)
        # A new buffer is zero already, and takes memory only as it is touched.
        return buffer.zero_() if self.allocated_bytes == before else buffer

    def take_within(self, kind: BufferKind, most_bytes: int) -> Buffer | None:
        """Return a free buffer, or a new one if the pool then has at most ``most_bytes``; otherwise None."""
        sort = _sort_of_kind(kind)
        self._sorts.add(sort)
        if free := self._idle.get(sort) or self._free.get(sort):
            return free.pop()
        if self.allocated_bytes + kind.num_bytes > most_bytes:
            return None
        self.allocated_bytes += kind.num_bytes
        return new_buffer(kind.format, kind.arrays, kind.numel, kind.own_master, self._allocate)

    def give_back(self, buffer: Buffer) -> None:
        own_master = not isinstance(buffer, Tensor) and buffer.own_master
        arrays, numel = buffer.shape
        sort = _sort_of(format_of(buffer), arrays, numel, own_master)
        if self._pending_reads is not None and buffer in self._pending_reads:
            self.unread.append(buffer)
        elif sort in self._sorts:
            self._free.setdefault(sort, []).append(buffer)
        else:
            self.allocated_bytes -= buffer.nbytes

    def collect(self) -> None:
        """Free the buffers that have been read since they came back."""
        buffers, self.unread = self.unread, []
        for buffer in buffers:
            self.give_back(buffer)

    def trim(self) -> None:
        """Release the memory of buffers that have been free since the last call."""
        self.allocated_bytes -= sum(buffer.nbytes for buffers in self._idle.values() for buffer in buffers)
        self._idle, self._free = self._free, {}

    def clear(self) -> None:
        """Release the memory of all free buffers."""
        self.trim()
        self.trim()

    def forget(self, kinds: Iterable[BufferKind]) -> None:
        """Release the memory of free buffers of these kinds, and of others as they come back, unless their kind is
        taken again."""
        for sort in {_sort_of_kind(kind) for kind in kinds}:
            self._sorts.discard(sort)
            free = [*self._free.pop(sort, ()), *self._idle.pop(sort, ())]
            self.allocated_bytes -= sum(buffer.nbytes for buffer in free)


class Slot:
    """Host memory between the copy streams: gradients come in, and new parameters go out."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self.last_publish: Copy | None = None
        """The copy that last read the slot; the next copy into the slot has to wait for it."""

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Return all elements as ``dtype``."""
        return self._buffer.view(dtype)

    def view(self, dtype: torch.dtype, segment: SegmentLayout) -> Tensor:
        """Return the elements of a tile's segment as ``dtype``."""
        return self._buffer.view(dtype)[segment.buffer_offset : segment.buffer_offset + segment.numel]

    def view_of_run(self, dtype: torch.dtype, run: Sequence[SegmentLayout]) -> tuple[Tensor, list[int]]:
        """Return the elements of neighbors as ``dtype``, and the first element of each there."""
        first, last = run[0].buffer_offset, run[-1].buffer_offset + run[-1].numel
        return self._buffer.view(dtype)[first:last], [segment.buffer_offset - first for segment in run]


def cut_slots(streams: CopyStreams, sizes: Sequence[int]) -> tuple[list[Slot], int]:
    """Make one slot for each size in bytes, at a multiple of 64 bytes; return the slots and the bytes allocated.

    Pinning inside a hook can deadlock with NCCL and takes milliseconds, so slots are made together with tiles. They
    are packed into blocks close to a power of two, to which torch's pinned allocator rounds up; it is needed where the
    driver cannot pin memory that exists already.
    """
    slots: list[Slot] = []
    allocated_bytes = remaining = sum(padded_bytes(size) for size in sizes)
    while len(slots) < len(sizes):
        capacity = min(1 << (remaining.bit_length() - 1), _LARGEST_BLOCK_BYTES) if remaining else 0
        packed, block_bytes = [], 0
        for size in sizes[len(slots) :]:
            if packed and block_bytes + padded_bytes(size) > capacity:
                break
            packed.append((block_bytes, size))
            block_bytes += padded_bytes(size)
        block = streams.allocate(block_bytes)
        slots += [Slot(block[start : start + size]) for start, size in packed]
        remaining -= block_bytes
    return slots, allocated_bytes


class Slots:
    """The slots of one tier: one for each tile where gradients stay until the step, and a few that tiles take in turn.

    Attributes:
        own_bytes: bytes of tiles' own slots.
        sum_bytes: bytes of tiles' own slots for sums, which are float32.
        passing_bytes: bytes of those that tiles take in turn.
    """

    def __init__(self, streams: CopyStreams) -> None:
        self.own_bytes = self.sum_bytes = self.passing_bytes = 0
        self._streams = streams
        self._passing: deque[Slot] = deque()
        """All of one size."""

    def own(self, sizes: Sequence[int]) -> list[Slot]:
        """Make a slot for each of some tiles, of these sizes in bytes."""
        slots, own_bytes = cut_slots(self._streams, sizes)
        self.own_bytes += own_bytes
        return slots

    def for_sums(self, sizes: Sequence[int]) -> list[Slot]:
        """As :meth:`own`, for sums."""
        slots, sum_bytes = cut_slots(self._streams, sizes)
        self.sum_bytes += sum_bytes
        return slots

    def grow(self, slot_bytes: int, count: int) -> None:
        """Make sure that tiles take at least ``count`` slots of at least ``slot_bytes`` in turn."""
        before = self.passing_bytes // len(self._passing) if self._passing else 0
        slot_bytes = padded_bytes(slot_bytes)
        if slot_bytes > before:
            # The old slots are freed before the new ones are made.
            self._streams.synchronize()
            count = max(count, len(self._passing))
            self._passing, self.passing_bytes = deque(), 0
        slots, added_bytes = cut_slots(self._streams, [max(slot_bytes, before)] * (count - len(self._passing)))
        self._passing.extend(slots)
        self.passing_bytes += added_bytes

    def next(self) -> Slot:
        """Return the slot that was taken longest ago; the caller waits for its ``last_publish``."""
        self._passing.rotate(-1)
        return self._passing[0]

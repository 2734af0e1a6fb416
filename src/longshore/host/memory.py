"""Memory of optimizer state and accumulators, on the host or on a device, and slots for the copy engine."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from longshore.layout import SegmentLayout
from longshore.transfer import CopyHandle, Transfer

_HUGE_PAGE_BYTES = 2 << 20
_LARGEST_BLOCK_BYTES = 1 << 30


def allocate_zeros(numel: int) -> Tensor:
    """Float32 zeros that take memory only as they are touched.

    Large blocks ask for huge pages: with 4 KiB pages a good part of a step's time is address translation.
    """
    num_bytes = 4 * numel
    if num_bytes < _HUGE_PAGE_BYTES:
        return torch.zeros(numel, dtype=torch.float32, device="cpu")  # whatever the default device
    if hasattr(mmap, "MAP_PRIVATE"):
        # The default is shared memory: forked data loaders could write it, and Linux gives it no huge pages.
        block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        block = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
            block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.float32)


def available_bytes() -> int:
    """Host memory that could be had now without swapping."""
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def allocator_on(device: torch.device) -> Callable[[int], Tensor]:
    """A function that makes ``numel`` float32 zeros, flat, on ``device``."""
    if device.type == "cpu":
        return allocate_zeros
    return lambda numel: torch.zeros(numel, dtype=torch.float32, device=device)


class PageHolds:
    """The pages that have to stay as they are, because a snapshot has not read them yet.

    The thread that trains adds pages, and takes tiles away from them; the thread that reads releases them.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._unread: set[int] = set()
        """By address."""
        self.released = 0
        """Pages that were ever released."""

    def __contains__(self, page: Tensor) -> bool:
        return page.data_ptr() in self._unread

    def __bool__(self) -> bool:
        return bool(self._unread)

    def hold(self, pages: Iterable[Tensor]) -> None:
        with self._changed:
            self._unread.update(page.data_ptr() for page in pages)

    def release(self, page: Tensor) -> None:
        """The page has been read. May be called from any thread."""
        with self._changed:
            self._unread.discard(page.data_ptr())
            self.released += 1
            self._changed.notify_all()

    def wait_for(self, released: int) -> None:
        """Wait until :attr:`released` is not this number any more."""
        with self._changed:
            self._changed.wait_for(lambda: self.released != released)


class PagePool:
    """Pages by size: float32 ``[page_arrays, page_numel]``, the master and the states of the rule.

    A page that comes back is handed out again as it is: the caller writes all elements that it will read, or asks for
    zeros. Accumulators, the float32 sums of tiles with several gradients in a window, are pages of one array.

    Args:
        page_arrays: number of arrays in each page.
        allocate: makes flat zeros; see :func:`allocator_on`.
        holds: pages in it are handed out again only after they have been read; None: there are none.
    """

    def __init__(
        self, page_arrays: int, allocate: Callable[[int], Tensor] = allocate_zeros, holds: PageHolds | None = None
    ) -> None:
        self.allocated_bytes = 0
        self._page_arrays = page_arrays
        self._allocate = allocate
        self._holds = holds
        self._free: dict[int, list[Tensor]] = {}
        self._idle: dict[int, list[Tensor]] = {}
        """Pages that were free before the last :meth:`trim`."""
        self.unread: list[Tensor] = []
        """Pages that came back before a snapshot had read them."""

    def page_bytes(self, page_numel: int) -> int:
        return 4 * self._page_arrays * page_numel

    def take(self, page_numel: int) -> Tensor:
        page = self.take_within(page_numel, sys.maxsize)
        assert page is not None
        return page

    def take_zeros(self, page_numel: int) -> Tensor:
        before = self.allocated_bytes
        page = self.take(page_numel)
        return page.zero_() if self.allocated_bytes == before else page  # a new one takes memory only as it is touched

    def take_within(self, page_numel: int, most_bytes: int) -> Tensor | None:
        """A free page, or a new one if the pool has at most ``most_bytes`` with it; otherwise None."""
        if free := self._idle.get(page_numel) or self._free.get(page_numel):
            return free.pop()
        if self.allocated_bytes + self.page_bytes(page_numel) > most_bytes:
            return None
        self.allocated_bytes += self.page_bytes(page_numel)
        return self._allocate(self._page_arrays * page_numel).view(self._page_arrays, page_numel)

    def give_back(self, page: Tensor) -> None:
        if self._holds is not None and page in self._holds:
            self.unread.append(page)
        elif page.shape[0] == self._page_arrays:
            self._free.setdefault(page.shape[1], []).append(page)
        else:
            self.allocated_bytes -= page.nbytes

    def collect(self) -> None:
        """Make pages free that have been read since they came back."""
        pages, self.unread = self.unread, []
        for page in pages:
            self.give_back(page)

    def trim(self) -> None:
        """Let go of the pages that were free since the last call."""
        self.allocated_bytes -= sum(page.nbytes for pages in self._idle.values() for page in pages)
        self._idle, self._free = self._free, {}

    def clear(self) -> None:
        """Let go of all free pages."""
        self.trim()
        self.trim()

    def set_arrays(self, page_arrays: int) -> None:
        """Make pages with this number of arrays from now on; those of the old shape are freed as they come back."""
        if page_arrays != self._page_arrays:
            self.clear()
            self._page_arrays = page_arrays


class Slot:
    """Host bytes between the copy streams: gradients come in, new parameters go out in their place."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self.last_publish: CopyHandle | None = None
        """The copy that last read the slot; the next copy into it has to wait for that one."""

    def view(self, dtype: torch.dtype, segment: SegmentLayout) -> Tensor:
        """The elements of a tile's segment as ``dtype``."""
        return self._buffer.view(dtype)[segment.page_offset : segment.page_offset + segment.numel]


def padded_bytes(size: int) -> int:
    """Bytes that a slot of ``size`` bytes takes in its block."""
    return -(-size // 64) * 64


def cut_slots(transfer: Transfer, sizes: Sequence[int]) -> tuple[list[Slot], int]:
    """Make one slot for each size in bytes, each at a multiple of 64 bytes; returns them and the bytes allocated.

    Pinning inside a hook can deadlock with NCCL and takes milliseconds, so slots are made when tiles are. torch's
    pinned allocator rounds each block up to a power of two, so they are packed into blocks that are one, or nearly.
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
        block = transfer.allocate(block_bytes)
        slots += [Slot(block[start : start + size]) for start, size in packed]
        remaining -= block_bytes
    return slots, allocated_bytes


class SlotRing:
    """Slots of one size that take turns; the caller of :meth:`next` waits for its ``last_publish``."""

    def __init__(self, transfer: Transfer) -> None:
        self.allocated_bytes = 0
        self._transfer = transfer
        self._slot_bytes = 0
        self._slots: deque[Slot] = deque()

    def grow(self, slot_bytes: int, count: int) -> None:
        """Have at least ``count`` slots of at least ``slot_bytes`` each."""
        if slot_bytes > self._slot_bytes:
            # The old ones are freed before the new ones are made.
            self._transfer.synchronize()
            count = max(count, len(self._slots))
            self._slot_bytes, self._slots, self.allocated_bytes = slot_bytes, deque(), 0
        slots, added_bytes = cut_slots(self._transfer, [self._slot_bytes] * (count - len(self._slots)))
        self._slots.extend(slots)
        self.allocated_bytes += added_bytes

    def next(self) -> Slot:
        self._slots.rotate(-1)
        return self._slots[0]

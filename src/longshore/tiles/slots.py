"""Slots: host memory between the copy streams, in which gradients come in and new parameters go out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from longshore.layout.tiles import SegmentLayout, padded_bytes
from longshore.transfer import Copy, CopyStreams

_LARGEST_BLOCK_BYTES = 1 << 30


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

"""Snapshots: the state of an optimizer at one moment, for a thread that writes it while training goes on.

Nothing is copied at that moment. As long as a buffer has not been read, a step of its tile writes to another buffer,
which becomes the tile's (as in stepping ahead); the old buffer belongs to the snapshot alone until it has been read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from longshore.errors import LongshoreError
from longshore.kernels import Buffer, block_of
from longshore.layout.tiles import SegmentLayout
from longshore.tiles.memory import BufferKind, BufferPool, PendingReads, read_array
from longshore.tiles.speculation import Speculator
from longshore.tiles.tile import Tile

_PART_OF_DEVICE = 4
Read = tuple[int, str]
"""The index of a parameter in the store, and the name of an array."""


class StateSnapshot:
    """Buffers of a store as they were at one moment.

    Args:
        pending_reads: the store's set of unread buffers; these buffers are in it until they have been read.
        arrays: for each key, the names of the arrays of a buffer with a master.
        parts: for each key, its buffers and its segments in them.
        reads: everything that will be read; each entry is read once, and all from one thread.
    """

    def __init__(
        self,
        pending_reads: PendingReads,
        arrays: Mapping[int, Sequence[str]],
        parts: Mapping[int, Sequence[tuple[Buffer, SegmentLayout]]],
        reads: Sequence[Read],
    ) -> None:
        self._pending_reads = pending_reads
        self._arrays = arrays
        self._parts = parts
        buffers = [buffer for key, _ in reads for buffer, _ in parts[key]]
        self._buffers = {buffer.data_ptr(): buffer for buffer in buffers}
        self._missing = Counter(buffer.data_ptr() for buffer in buffers)
        pending_reads.add(buffers)

    def read_range(self, key: int, which: str) -> Tensor:
        """Return one array of a parameter of the store: float32, flat, on the CPU."""
        arrays = self._arrays[key]
        parts = [read_array(buffer, arrays, which, segment.in_buffer) for buffer, segment in self._parts[key]]
        # The result is a finished copy: cat() copies even a single tensor, and cpu() waits.
        values = torch.cat(parts).cpu() if parts else torch.empty(0, dtype=torch.float32, device="cpu")
        for buffer, _ in self._parts[key]:
            address = buffer.data_ptr()
            self._missing[address] -= 1
            if self._missing[address] == 0:
                self._pending_reads.release(self._buffers.pop(address))
        return values

    def close(self) -> None:
        """Release the buffers that were not read. This method may be called again."""
        for buffer in list(self._buffers.values()):
            self._pending_reads.release(buffer)
        self._buffers.clear()
        self._parts = {}


class Snapshots:
    """Replacement of buffers that a snapshot has still to read, for the tiles of one tier.

    Args:
        buffers: the tiles' pool, which was made with ``pending_reads``.
        pending_reads: the buffers that are still to be read.
        speculator: lends its spare buffers, if it has any.
        device: device of the buffers.
    """

    def __init__(
        self, buffers: BufferPool, pending_reads: PendingReads, speculator: Speculator, device: torch.device
    ) -> None:
        self._buffers = buffers
        self._pending_reads = pending_reads
        self._speculator = speculator
        self._device = device
        self._most_bytes = 0
        """Limit of the tiles' pool while other buffers are taken from it, in bytes."""
        self.active = False
        """Whether a snapshot may still have buffers to read, or buffers to give back."""

    def prepare(self, memory_bytes: int) -> None:
        """Prepare to take a snapshot.

        Args:
            memory_bytes: host memory for other buffers, if the speculator has none to lend (for buffers on a device, a
                part of the free memory there is used instead). A step that needs more waits for the reader.

        Raises:
            LongshoreError: the previous snapshot is still being read.
        """
        self.collect()
        if self._pending_reads:
            raise LongshoreError("another checkpoint of this optimizer is still being written: wait for it first")
        self.active = True
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)  # the reader is on another stream
            memory_bytes = torch.get_device_module(self._device).mem_get_info(self._device)[0] // _PART_OF_DEVICE
        self._most_bytes = self._buffers.allocated_bytes + memory_bytes

    @contextmanager
    def buffer_for(self, tile: Tile) -> Iterator[Buffer | None]:
        """Yield the buffer to step the tile into, which the caller makes the tile's; None: step it in place."""
        old = unused = tile.buffer
        buffer = None if old is None else self._other_than(old, tile.buffer_kind)
        try:
            yield buffer
        except BaseException:
            unused = buffer
            raise
        finally:
            if buffer is not None and unused is not None:
                # An old buffer becomes free once it has been read.
                (self._speculator.spares or self._buffers).give_back(unused)

    def make_writable(self, tile: Tile) -> None:
        """Prepare for a write to the tile's buffer that is not a step."""
        with self.buffer_for(tile) as buffer:
            if buffer is not None and tile.buffer is not None:
                block_of(buffer).copy_(block_of(tile.buffer))
                tile.buffer = buffer

    def collect(self) -> None:
        """Free the buffers that have been read, and after the last of them release the memory that no tile needs."""
        pools = [pool for pool in (self._buffers, self._speculator.spares) if pool is not None]
        for pool in pools:
            pool.collect()
        if self.active and not self._pending_reads and not any(pool.unread for pool in pools):
            self.active = False
            self._buffers.clear()

    def _other_than(self, buffer: Buffer, kind: BufferKind) -> Buffer | None:
        while True:
            released = self._pending_reads.released  # read first, so that a later release ends the wait
            if buffer not in self._pending_reads:
                return None
            self.collect()
            if self._speculator.spares is not None:  # then no tile has its masters elsewhere
                spare = self._speculator.lend(kind)
            else:
                spare = self._buffers.take_within(kind, self._most_bytes)
            if spare is not None:
                return spare
            self._pending_reads.wait_for(released)

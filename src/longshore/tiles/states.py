"""State of tiles, by the key of a range and the name of an array: read, written, compared, and kept as it is at one
moment, for a thread that writes it while training goes on.

Nothing is copied at that moment. As long as a buffer has not been read, a step of its tile writes to another buffer,
which becomes the tile's (as in stepping ahead); the old buffer belongs to the snapshot alone until it has been read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from longshore.kernels import Buffer, master_of, read_state, write_state, zero_elements
from longshore.layout.formats import NEVER_NEGATIVE
from longshore.layout.tiles import SegmentLayout
from longshore.tiles.memory import PendingReads
from longshore.tiles.tier import Tier
from longshore.tiles.tile import GRADIENT, MASTER, Segment
from longshore.tiles.tiles import Tiles

Read = tuple[int, str]
"""The key of a range, and the name of an array."""


def read_array(buffer: Buffer, arrays: Sequence[str], which: str, elements: slice) -> Tensor:
    """Return some elements of one array, float32: a view, or decoded. ``arrays`` names those of a buffer with a master,
    which may lack it."""
    if which == arrays[0]:
        return master_of(buffer)[elements]
    return read_state(buffer, len(arrays) - arrays.index(which), elements, which in NEVER_NEGATIVE)


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
        """Return one array of a range: float32, flat, on the CPU."""
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


class RangeStates:
    """State of the ranges that one process steps, by their keys. Values are flat.

    Arrays are known by the names of the optimizer's states, :data:`MASTER`, and :data:`GRADIENT` for the gradient of
    the window. Every method but :meth:`set_states` and :meth:`clear` raises the errors of :meth:`Tiles.check_usable`.
    """

    def __init__(self, tiles: Tiles) -> None:
        self._tiles = tiles

    def set_states(self, elementwise: Sequence[str], of_matrices: Sequence[str] = ()) -> None:
        """Name the state arrays of parameters that are stepped one element at a time, and of matrices, in the order in
        which their rules read them; arrays that later calls add are zero."""
        self._tiles.drain()
        for tier in self._tiles.tiers:
            tier.set_states(elementwise, of_matrices)

    def _masters(self, key: int) -> Iterator[tuple[Tier, Segment, Tensor]]:
        """Yield the parts of a master in state buffers, which may not have been made before a step; none if the
        parameter is its own master."""
        for tier, tile, segment in self._tiles.placed(key):
            buffer = tile.have_buffer(tier.buffers)
            if not tile.own_master:
                yield tier, segment, master_of(buffer)[segment.layout.in_buffer]

    def _parts(self, key: int, which: str) -> Iterator[tuple[Segment, Tensor]]:
        """Yield the parts of one array, float32: in state buffers, or in the parameter that is its own master."""
        tiles = self._tiles
        for tier, tile, segment in tiles.placed(key):
            buffer = tile.have_buffer(tier.buffers)
            if which != MASTER or not tile.own_master:
                yield segment, read_array(buffer, tile.arrays.names, which, segment.layout.in_buffer)
            elif tiles.values_of is not None:
                yield segment, segment.part_of(tiles.values_of(key))

    def read(self, key: int, which: str) -> Tensor:
        """Return a copy of one array: float32, on the host. A gradient that has not arrived has no elements."""
        if which == GRADIENT:
            self._tiles.settle()
            segments = [segment for _, _, segment in self._tiles.placed(key) if segment.arrivals > 0]
            found = [segment.wait().float().cpu() for segment in segments]
        else:
            self._tiles.check_usable()
            found = [kept.cpu() for _, kept in self._parts(key, which)]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.float32, device="cpu")

    def differs(self, key: int, which: str, values: Tensor) -> bool:
        """Return whether any bit of one array is not that of ``values`` (float32, on the CPU)."""
        self._tiles.check_usable()
        return not all(
            torch.equal(kept.view(torch.int32).cpu(), segment.part_of(values).view(torch.int32))
            for segment, kept in self._parts(key, which)
        )

    def snapshot(self, reads: Sequence[Read], memory_bytes: int) -> StateSnapshot:
        """Return the state as it is now, for another thread to read while this one goes on.

        Args:
            reads: everything that will be read: keys of ranges, and names of arrays. A parameter that is its own master
                has none here.
            memory_bytes: memory for further buffers, if there are no spares. A step that needs more has to wait.

        Raises:
            LongshoreError: the previous snapshot is not closed.
        """
        tiles = self._tiles
        tiles.check_usable()
        assert not any(tile.own_master for key, which in reads if which == MASTER for _, tile, _ in tiles.placed(key))
        tiles.drain()
        for tier in tiles.tiers:
            tier.snapshots.prepare(memory_bytes)
        placed = {key: [*tiles.placed(key)] for key in {key for key, _ in reads}}
        buffers = {
            key: [(tile.have_buffer(tier.buffers), segment.layout) for tier, tile, segment in parts]
            for key, parts in placed.items()
        }
        arrays = {key: parts[0][1].arrays.names if parts else () for key, parts in placed.items()}
        return StateSnapshot(tiles.pending_reads, arrays, buffers, reads)

    # -- writing --------------------------------------------------------------

    def _void(self, key: int) -> None:
        """Drop the results of work that read the buffers or the gradient, which are about to be written."""
        self._tiles.drain()
        for tier, tile, _ in self._tiles.placed(key):
            tier.speculator.void(tile)
            tier.snapshots.make_writable(tile)

    def write(self, key: int, which: str, values: Tensor) -> None:
        """Set one array; :data:`GRADIENT` only if there is one. A parameter that is its own master stays as it is."""
        if which == GRADIENT:
            self._tiles.settle()
        self._tiles.check_usable()
        self._void(key)
        for tier, tile, segment in self._tiles.placed(key):
            part, elements = segment.part_of(values), segment.layout.in_buffer
            if which == GRADIENT:
                segment.wait().copy_(part)
                continue
            buffer, names = tile.have_buffer(tier.buffers), tile.arrays.names
            if which != MASTER:
                write_state(buffer, len(names) - names.index(which), elements, which in NEVER_NEGATIVE, part)
            elif not tile.own_master:
                master_of(buffer)[elements].copy_(part)

    def clear(self, key: int) -> None:
        """Zero all arrays."""
        self._void(key)
        for _, tile, segment in self._tiles.placed(key):
            if tile.buffer is not None:  # a tile without a buffer has only zeros
                zero_elements(tile.buffer, segment.layout.in_buffer)

    # -- parameters that others wrote -----------------------------------------

    def adopt(self, key: int, values: Tensor, *, keep_matching: bool) -> None:
        """Set the master to ``values``, where parameters compute; ``keep_matching`` as in :meth:`States.adopt`."""
        self._tiles.check_usable()
        self._void(key)
        for tier, tile, _ in self._tiles.placed(key):
            tile.have_buffer(tier.buffers)  # before anything is stepped
        if keep_matching:
            self._reconcile(key, values, adopt=True)
            return
        for tier, segment, master in self._masters(key):
            tier.kernels.accumulate(master, tier.streams.read(segment.part_of(values)), add=False)

    def count_differing(self, key: int, values: Tensor) -> int:
        """Return how many elements of ``values`` differ from the rounded master; bits are compared."""
        self._tiles.check_usable()
        return self._reconcile(key, values, adopt=False)

    def _reconcile(self, key: int, values: Tensor, adopt: bool) -> int:
        return sum(
            tier.kernels.reconcile(master, tier.streams.read(segment.part_of(values)), adopt=adopt)
            for tier, segment, master in self._masters(key)
        )

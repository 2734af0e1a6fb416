"""Buffers that are held until they have been read."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
import torch
from support import plan_tiles
from torch import Tensor

from longshore.errors import LongshoreError
from longshore.kernels import HostKernels
from longshore.tiles.memory import BufferPool, PendingReads
from longshore.tiles.speculation import Speculator
from longshore.tiles.states import StateSnapshot
from longshore.tiles.tier import Snapshots
from longshore.tiles.tile import ArrayNames, Tile
from longshore.transfer import CopyStreams
from longshore.transfer.runner import runner_for

ARRAYS = ("master", "exp_avg")


class Buffers:
    """Two tiles of one parameter and a half, and what snapshots them."""

    def __init__(self) -> None:
        self.pending_reads = PendingReads()
        self.pool = BufferPool(pending_reads=self.pending_reads)
        kernels, transfer = HostKernels(threads=1), CopyStreams()
        runner, parts = runner_for(kernels.asynchronous, 1, transfer.begin_job), {}
        speculator = Speculator(0, BufferPool(), transfer, kernels, runner, parts.__getitem__)
        self.snapshots = Snapshots(self.pool, self.pending_reads, speculator, torch.device("cpu"))
        layouts, arrays = plan_tiles([(0, 48), (1, 16)], 32), ArrayNames(ARRAYS)
        self.tiles = [Tile(layout, torch.float32, torch.float32, arrays) for layout in layouts]
        self.parts = {index: [] for index in (0, 1)}
        for place, tile in enumerate(self.tiles):
            tile.have_buffer(self.pool)
            assert tile.buffer is not None
            tile.buffer.fill_(float(place))
            for index, segment in tile.segments.items():
                self.parts[index].append((tile, segment))

    def take(self, *reads: tuple[int, str], memory_bytes: int = 1 << 20) -> StateSnapshot:
        self.snapshots.prepare(memory_bytes)
        buffers = {
            index: [(tile.have_buffer(self.pool), segment.layout) for tile, segment in parts]
            for index, parts in self.parts.items()
        }
        return StateSnapshot(self.pending_reads, dict.fromkeys(buffers, ARRAYS), buffers, reads)

    def step(self, place: int) -> Tensor | None:
        """As a step would: into another buffer, or in place. Returns the other one."""
        tile = self.tiles[place]
        with self.snapshots.buffer_for(tile) as buffer:
            if buffer is None:
                assert tile.buffer is not None
                tile.buffer.fill_(9.0)
                return None
            buffer.fill_(9.0)
            tile.buffer = buffer
        return buffer


EXPECTED = torch.cat([torch.zeros(32), torch.ones(16)])


def test_a_buffer_is_held_until_its_last_read() -> None:
    buffers = Buffers()
    snapshot = buffers.take((0, "master"), (0, "exp_avg"), (1, "master"))
    assert torch.equal(snapshot.read_range(0, "master"), EXPECTED)
    assert buffers.step(0) is not None and buffers.step(1) is not None
    assert buffers.step(0) is None  # that buffer is nobody's but the tile's
    assert torch.equal(snapshot.read_range(0, "exp_avg"), EXPECTED)
    buffers.snapshots.collect()
    assert (
        sum(buffer.nbytes for buffer in buffers.pool.unread) == 2 * 4 * 32
    )  # the second buffer has (1, "master") to be read
    assert torch.equal(snapshot.read_range(1, "master"), torch.ones(16))
    assert buffers.pool.allocated_bytes == 4 * 2 * 4 * 32
    buffers.snapshots.collect()
    assert not buffers.pending_reads and not buffers.snapshots.active
    assert buffers.pool.allocated_bytes == 2 * 2 * 4 * 32


def test_what_is_not_read_is_not_held() -> None:
    buffers = Buffers()
    buffers.take((1, "master"))
    assert buffers.step(0) is None
    assert buffers.step(1) is not None


def test_a_copy_is_what_was_read() -> None:
    buffers = Buffers()
    snapshot = buffers.take((1, "master"))
    values = snapshot.read_range(1, "master")
    assert buffers.step(1) is None
    assert torch.equal(values, torch.ones(16))


def test_closed_before_everything_was_read() -> None:
    buffers = Buffers()
    snapshot = buffers.take((0, "master"), (1, "exp_avg"))
    buffers.step(0)
    with pytest.raises(LongshoreError, match="wait for it first"):
        buffers.take((0, "master"))
    snapshot.close()
    snapshot.close()
    assert buffers.step(1) is None
    assert torch.equal(buffers.take((0, "master")).read_range(0, "master"), torch.full((48,), 9.0))


@pytest.mark.parametrize("free", [False, True])
def test_beyond_its_memory_a_step_waits(free: bool) -> None:
    """Until its own buffer has been read, or another one that is free then."""
    buffers = Buffers()
    snapshot = buffers.take((0, "master"), (1, "exp_avg"), memory_bytes=2 * 4 * 32 if free else 0)
    if free:
        assert buffers.step(0) is not None
    taken: list[Tensor | None] = []
    stepping = threading.Thread(target=lambda: taken.append(buffers.step(1)), daemon=True)
    stepping.start()
    stepping.join(0.05)
    assert stepping.is_alive()
    assert torch.equal(snapshot.read_range(0, "master"), EXPECTED)
    stepping.join(0.0 if free else 0.05)
    if free:
        stepping.join(10)
        assert taken[0] is not None  # the buffer that the first tile had before
        assert torch.equal(snapshot.read_range(1, "exp_avg"), torch.ones(16))
    else:
        assert stepping.is_alive()  # the second buffer has one more to be read
        snapshot.read_range(1, "exp_avg")
        stepping.join(10)
        assert taken == [None]
    assert buffers.pool.allocated_bytes == (3 if free else 2) * 2 * 4 * 32


def test_a_step_that_fails_gives_its_buffer_back() -> None:
    buffers = Buffers()
    buffers.take((0, "master"))
    old = buffers.tiles[0].buffer
    with suppress(ZeroDivisionError), buffers.snapshots.buffer_for(buffers.tiles[0]) as buffer:
        raise ZeroDivisionError
    assert buffer is not None
    assert buffers.tiles[0].buffer is old
    assert buffers.step(0) is buffer


def test_the_last_buffer_is_read_while_its_tile_is_stepped() -> None:
    buffers = Buffers()
    snapshot = buffers.take((0, "master"), (1, "master"))
    buffers.step(0)
    with buffers.snapshots.buffer_for(buffers.tiles[1]) as buffer:
        assert buffer is not None
        buffers.tiles[1].buffer = buffer
        snapshot.read_range(0, "master")
        snapshot.read_range(1, "master")
    buffers.snapshots.collect()
    assert buffers.pool.allocated_bytes == 2 * 2 * 4 * 32

"""Pages that are held until they have been read."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from longshore.errors import LongshoreError
from longshore.host.memory import PageHolds, PagePool
from longshore.host.snapshot import PageSnapshot, Snapshots
from longshore.host.speculation import Speculator
from longshore.host.tile import Tile
from longshore.host.worker import runner_for
from longshore.kernels import HostKernels
from longshore.layout import plan_tiles
from longshore.transfer import DirectTransfer

ARRAYS = ("master", "exp_avg")


class Pages:
    """Two tiles of one parameter and a half, and what snapshots them."""

    def __init__(self) -> None:
        self.holds = PageHolds()
        self.pool = PagePool(2, holds=self.holds)
        kernels, transfer = HostKernels(threads=1), DirectTransfer()
        runner, parts = runner_for(kernels, 1, transfer.worker_delay), {}
        speculator = Speculator(0, PagePool(2), transfer, kernels, runner, parts.__getitem__)
        self.snapshots = Snapshots(self.pool, self.holds, speculator, torch.device("cpu"))
        self.tiles = [Tile(layout, torch.float32, torch.float32) for layout in plan_tiles([(0, 48), (1, 16)], 32)]
        self.parts = {index: [] for index in (0, 1)}
        for place, tile in enumerate(self.tiles):
            tile.have_page(self.pool)
            assert tile.page is not None
            tile.page.fill_(float(place))
            for index, segment in tile.segments.items():
                self.parts[index].append((tile, segment))

    def take(self, *reads: tuple[int, str], memory_bytes: int = 1 << 20) -> PageSnapshot:
        self.snapshots.prepare(memory_bytes)
        pages = {
            index: [(tile.have_page(self.pool), segment.layout) for tile, segment in parts]
            for index, parts in self.parts.items()
        }
        return PageSnapshot(self.holds, {name: row for row, name in enumerate(ARRAYS)}, pages, reads)

    def step(self, place: int) -> Tensor | None:
        """As a step would: into another page, or in place. Returns the other one."""
        tile = self.tiles[place]
        with self.snapshots.page_for(tile) as page:
            if page is None:
                assert tile.page is not None
                tile.page.fill_(9.0)
                return None
            page.fill_(9.0)
            tile.page = page
        return page


EXPECTED = torch.cat([torch.zeros(32), torch.ones(16)])


def test_a_page_is_held_until_its_last_read() -> None:
    pages = Pages()
    snapshot = pages.take((0, "master"), (0, "exp_avg"), (1, "master"))
    assert torch.equal(snapshot.read_run(0, "master"), EXPECTED)
    assert pages.step(0) is not None and pages.step(1) is not None
    assert pages.step(0) is None  # that page is nobody's but the tile's
    assert torch.equal(snapshot.read_run(0, "exp_avg"), EXPECTED)
    pages.snapshots.collect()
    assert sum(page.nbytes for page in pages.pool.unread) == 2 * 4 * 32  # the second page has (1, "master") to be read
    assert torch.equal(snapshot.read_run(1, "master"), torch.ones(16))
    assert pages.pool.allocated_bytes == 4 * 2 * 4 * 32
    pages.snapshots.collect()
    assert not pages.holds and not pages.snapshots.active
    assert pages.pool.allocated_bytes == 2 * 2 * 4 * 32


def test_what_is_not_read_is_not_held() -> None:
    pages = Pages()
    pages.take((1, "master"))
    assert pages.step(0) is None
    assert pages.step(1) is not None


def test_a_copy_is_what_was_read() -> None:
    pages = Pages()
    snapshot = pages.take((1, "master"))
    values = snapshot.read_run(1, "master")
    assert pages.step(1) is None
    assert torch.equal(values, torch.ones(16))


def test_closed_before_everything_was_read() -> None:
    pages = Pages()
    snapshot = pages.take((0, "master"), (1, "exp_avg"))
    pages.step(0)
    with pytest.raises(LongshoreError, match="wait for it first"):
        pages.take((0, "master"))
    snapshot.close()
    snapshot.close()
    assert pages.step(1) is None
    assert torch.equal(pages.take((0, "master")).read_run(0, "master"), torch.full((48,), 9.0))


@pytest.mark.parametrize("free", [False, True])
def test_beyond_its_memory_a_step_waits(free: bool) -> None:
    """Until its own page has been read, or another one that is free then."""
    pages = Pages()
    snapshot = pages.take((0, "master"), (1, "exp_avg"), memory_bytes=2 * 4 * 32 if free else 0)
    if free:
        assert pages.step(0) is not None
    taken: list[Tensor | None] = []
    stepping = threading.Thread(target=lambda: taken.append(pages.step(1)), daemon=True)
    stepping.start()
    stepping.join(0.05)
    assert stepping.is_alive()
    assert torch.equal(snapshot.read_run(0, "master"), EXPECTED)
    stepping.join(0.0 if free else 0.05)
    if free:
        stepping.join(10)
        assert taken[0] is not None  # the page that the first tile had before
        assert torch.equal(snapshot.read_run(1, "exp_avg"), torch.ones(16))
    else:
        assert stepping.is_alive()  # the second page has one more to be read
        snapshot.read_run(1, "exp_avg")
        stepping.join(10)
        assert taken == [None]
    assert pages.pool.allocated_bytes == (3 if free else 2) * 2 * 4 * 32


def test_a_step_that_fails_gives_its_page_back() -> None:
    pages = Pages()
    pages.take((0, "master"))
    old = pages.tiles[0].page
    with suppress(ZeroDivisionError), pages.snapshots.page_for(pages.tiles[0]) as page:
        raise ZeroDivisionError
    assert page is not None
    assert pages.tiles[0].page is old
    assert pages.step(0) is page


def test_the_last_page_is_read_while_its_tile_is_stepped() -> None:
    pages = Pages()
    snapshot = pages.take((0, "master"), (1, "master"))
    pages.step(0)
    with pages.snapshots.page_for(pages.tiles[1]) as page:
        assert page is not None
        pages.tiles[1].page = page
        snapshot.read_run(0, "master")
        snapshot.read_run(1, "master")
    pages.snapshots.collect()
    assert pages.pool.allocated_bytes == 2 * 2 * 4 * 32

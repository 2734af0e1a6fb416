"""The state of an optimizer as it was at one moment, for a thread that writes it while training goes on.

Nothing is copied at that moment. While a page is still to be read, a step of its tile writes into another page, which
becomes the tile's (as in stepping ahead); the old page belongs to the snapshot alone until it has been read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from longshore.errors import LongshoreError
from longshore.host.memory import PageHolds, PagePool
from longshore.host.speculation import Speculator
from longshore.host.tile import Tile
from longshore.layout import SegmentLayout

_PART_OF_DEVICE = 4
Read = tuple[int, str]
"""The index of a parameter in the store, and the name of an array."""


class PageSnapshot:
    """The pages of a store as they were at one moment.

    Args:
        holds: the store's; it has the pages until they have been read.
        rows: the row of each array in a page.
        parts: for each key, its pages and where in them it is.
        reads: everything that will be read, each once and from one thread.
    """

    def __init__(
        self,
        holds: PageHolds,
        rows: Mapping[str, int],
        parts: Mapping[int, Sequence[tuple[Tensor, SegmentLayout]]],
        reads: Sequence[Read],
    ) -> None:
        self._holds = holds
        self._rows = rows
        self._parts = parts
        pages = [page for key, _ in reads for page, _ in parts[key]]
        self._pages = {page.data_ptr(): page for page in pages}
        self._missing = Counter(page.data_ptr() for page in pages)
        holds.hold(pages)

    def read_run(self, key: int, which: str) -> Tensor:
        """One array of a parameter of the store: float32, flat, on the CPU."""
        row = self._rows[which]
        parts = [page[row, segment.in_page] for page, segment in self._parts[key]]
        # A copy, and a complete one: cat() copies even a single tensor, and cpu() waits.
        values = torch.cat(parts).cpu() if parts else torch.empty(0, dtype=torch.float32, device="cpu")
        for page, _ in self._parts[key]:
            address = page.data_ptr()
            self._missing[address] -= 1
            if self._missing[address] == 0:
                self._holds.release(self._pages.pop(address))
        return values

    def close(self) -> None:
        """Release the pages that were not read. May be called again."""
        for page in list(self._pages.values()):
            self._holds.release(page)
        self._pages.clear()
        self._parts = {}


class Snapshots:
    """Moves the tiles of one backend away from pages that a snapshot has still to read.

    Args:
        pages: the tiles' pool, which was made with ``holds``.
        holds: the pages that are still to be read.
        speculator: lends its spare pages, if it has any.
        device: where the pages are.
    """

    def __init__(self, pages: PagePool, holds: PageHolds, speculator: Speculator, device: torch.device) -> None:
        self._pages = pages
        self._holds = holds
        self._speculator = speculator
        self._device = device
        self._most_bytes = 0
        """Limit of the tiles' pool while spare pages come from it."""
        self.active = False
        """Whether a snapshot may still have pages to read, or pages to give back."""

    def prepare(self, memory_bytes: int) -> None:
        """Prepare to take a snapshot.

        Args:
            memory_bytes: host memory for other pages, where the speculator has none to lend (pages on a device: a part
                of what is free there). Beyond it a step waits for the reader.

        Raises:
            LongshoreError: the snapshot before is still being read.
        """
        self.collect()
        if self._holds:
            raise LongshoreError("another checkpoint of this optimizer is still being written: wait for it first")
        self.active = True
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the reader is on another stream
            memory_bytes = torch.cuda.mem_get_info(self._device)[0] // _PART_OF_DEVICE
        self._most_bytes = self._pages.allocated_bytes + memory_bytes

    @contextmanager
    def page_for(self, tile: Tile) -> Iterator[Tensor | None]:
        """The page to step the tile into, which the caller makes the tile's; None: step it in place."""
        old = unused = tile.page
        page = None if old is None else self._other_than(old)
        try:
            yield page
        except BaseException:
            unused = page
            raise
        finally:
            if page is not None and unused is not None:
                (self._speculator.spares or self._pages).give_back(unused)  # an old page is free when it has been read

    def make_writable(self, tile: Tile) -> None:
        """Prepare for a write to the tile's page that is no step."""
        with self.page_for(tile) as page:
            if page is not None and tile.page is not None:
                page.copy_(tile.page)
                tile.page = page

    def collect(self) -> None:
        """Make pages free that have been read, and after the last of them free the memory that no tile needs."""
        pools = [pool for pool in (self._pages, self._speculator.spares) if pool is not None]
        for pool in pools:
            pool.collect()
        if self.active and not self._holds and not any(pool.unread for pool in pools):
            self.active = False
            self._pages.clear()

    def _other_than(self, page: Tensor) -> Tensor | None:
        while True:
            released = self._holds.released  # first, so that a release from here on ends the wait
            if page not in self._holds:
                return None
            self.collect()
            if self._speculator.spares is not None:
                spare = self._speculator.lend(page.shape[1])
            else:
                spare = self._pages.take_within(page.shape[1], self._most_bytes)
            if spare is not None:
                return spare
            self._holds.wait_for(released)

"""Private memory: a forked process has none of it, and costs the parent nothing."""

from __future__ import annotations

import mmap
import signal
import sys
from collections.abc import Callable

import pytest
import torch
from forks import huge_pages, in_child, memory_at, sleeping_child
from torch import Tensor

from longshore.tiles.memory import allocate_zeros
from longshore.transfer import SimulatedTransfer, allocate_private, copy_on_fork
from longshore.transfer.host_memory import _Slabs, private_block

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
NUM_BYTES = 16 << 20
WAYS: dict[str, Callable[[], Tensor]] = {
    "states, spares and sums": lambda: allocate_zeros(NUM_BYTES // 4).view(torch.uint8),
    "slots": lambda: SimulatedTransfer().allocate(NUM_BYTES),
    "blocks that are pinned": lambda: torch.frombuffer(private_block(mmap.mmap, NUM_BYTES, False), dtype=torch.uint8),
}


@pytest.fixture(params=WAYS)
def memory(request: pytest.FixtureRequest) -> Tensor:
    return WAYS[request.param]().fill_(7)


def test_a_fork_takes_neither_memory_nor_huge_pages(memory: Tensor) -> None:
    before = memory_at(memory.data_ptr())
    assert before["Rss"] >= NUM_BYTES
    if huge_pages():
        assert before["AnonHugePages"] >= NUM_BYTES // 2
    with sleeping_child() as child:
        memory.fill_(8)
        after = memory_at(memory.data_ptr())
        assert memory_at(memory.data_ptr(), child).get("Rss", 0) == 0
    assert after["AnonHugePages"] == before["AnonHugePages"] and after["Rss"] == before["Rss"]
    assert bool((memory == 8).all())


@pytest.mark.parametrize("memory", [each for each in WAYS if "pinned" not in each], indirect=True)
def test_a_child_finds_zeros_and_writes_its_own(memory: Tensor) -> None:
    assert in_child(lambda: [int(memory.max()), int(memory.fill_(3).min())]) == "[0, 3]"
    assert bool((memory == 7).all())


@pytest.mark.parametrize("memory", ["blocks that are pinned"], indirect=True)
def test_a_child_that_touches_values_of_a_script_ends(memory: Tensor) -> None:
    """A parameter that rests there may have been handed on as ``p.detach()`` or in a ``state_dict()``."""
    assert in_child(lambda: int(memory[0])) == f"the child ended with {-signal.SIGSEGV}"


def test_memory_that_is_ordinary_again_is_copied(memory: Tensor) -> None:
    copy_on_fork([memory[100:]])
    assert in_child(lambda: int(memory.min())) == "7"


def test_a_kernel_that_cannot_wipe_leaves_the_child_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longshore.transfer.host_memory._MADV_WIPEONFORK", -1)
    memory = allocate_zeros(NUM_BYTES // 4).fill_(7)
    with sleeping_child() as child:
        assert memory_at(memory.data_ptr(), child) == {}
    copy_on_fork([memory])
    assert in_child(lambda: int(memory.min())) == "7"


@pytest.fixture
def large_pages(monkeypatch: pytest.MonkeyPatch) -> int:
    """Huge pages that are larger than a tile, as where pages have 64 KiB."""
    monkeypatch.setattr("longshore.transfer.host_memory._HUGE_PAGE_BYTES", 16 << 20)
    monkeypatch.setattr("longshore.transfer.host_memory._slabs", _Slabs())
    return 16 << 20


def test_tiles_that_are_smaller_than_a_huge_page_share_one(large_pages: int) -> None:
    sizes = [5 << 20, 3 << 20, (4 << 20) + 100]
    parts = [allocate_private(size).fill_(number) for number, size in enumerate(sizes, start=1)]
    assert [part.numel() for part in parts] == sizes
    assert [int(part.min()) for part in parts] == [int(part.max()) for part in parts] == [1, 2, 3]
    assert parts[0].data_ptr() % large_pages == 0
    assert [part.data_ptr() - parts[0].data_ptr() for part in parts] == [0, 5 << 20, 8 << 20]
    others = [allocate_private(6 << 20) for _ in range(4)]  # more than is left
    assert len({part.data_ptr() // large_pages for part in [*parts, *others]}) >= 3


def test_a_part_of_a_slab_is_given_again_as_zeros(large_pages: int) -> None:
    first, second = (allocate_private(5 << 20).fill_(7) for _ in range(2))
    address = first.data_ptr()
    del first
    third = allocate_private(5 << 20)
    assert third.data_ptr() == address and int(third.max()) == 0 and int(second.min()) == 7


def test_a_slab_is_freed_with_its_last_part(large_pages: int) -> None:
    first, second = (allocate_private(5 << 20).fill_(7) for _ in range(2))
    address = first.data_ptr()
    del first
    assert memory_at(address)["Rss"] >= 10 << 20
    del second
    assert memory_at(address) == {}
    assert int(allocate_private(5 << 20).max()) == 0


def test_a_slab_is_not_forked(large_pages: int) -> None:
    memory = allocate_private(5 << 20).fill_(7)
    assert in_child(lambda: int(memory.max())) == "0"

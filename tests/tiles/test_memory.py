from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from longshore.layout.tiles import SegmentLayout
from longshore.tiles.memory import BufferKind, BufferPool, allocate_zeros, allocator_on, cut_slots
from longshore.transfer import CopyStreams

HUGE_NUMEL = (2 << 20) // 4


# -- blocks -------------------------------------------------------------------


@pytest.mark.parametrize("numel", [1, 1000, HUGE_NUMEL - 1, HUGE_NUMEL, HUGE_NUMEL + 3])
def test_zeros(numel: int) -> None:
    block = allocate_zeros(numel)
    assert block.dtype == torch.float32 and block.shape == (numel,)
    assert block.data_ptr() % 64 == 0
    assert not block.any()
    block.fill_(1.0)
    assert bool((block == 1).all())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")
def test_large_blocks_are_private() -> None:
    """Shared memory would be written by forked children too, and gets no huge pages."""
    block = allocate_zeros(8 * HUGE_NUMEL)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, *_ = line.split()
        low, high = (int(address, 16) for address in addresses.split("-"))
        if low <= block.data_ptr() < high:
            assert permissions == "rw-p"
            return
    raise AssertionError("the block is in no mapping")


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are Linux's")
def test_a_kernel_without_huge_pages_is_only_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1)  # an advice that no kernel knows: OSError
    assert not allocate_zeros(HUGE_NUMEL).any()


# -- buffers --------------------------------------------------------------------


def test_buffers_are_counted_and_come_back() -> None:
    pool = BufferPool()
    first = pool.take(BufferKind(32, 3))
    assert first.shape == (3, 32) and first.dtype == torch.float32 and first.is_contiguous()
    assert not first.any()
    assert pool.allocated_bytes == 12 * 32
    pool.give_back(first)
    assert pool.take(BufferKind(16, 3)) is not first
    assert pool.allocated_bytes == 12 * 48
    assert pool.take(BufferKind(32, 3)) is first
    assert pool.take(BufferKind(32, 3)) is not first
    assert pool.allocated_bytes == 12 * 80


def test_a_buffer_comes_back_as_it_is_unless_zeros_are_asked_for() -> None:
    pool = BufferPool()
    pool.give_back(pool.take(BufferKind(32, 3)).fill_(7.0))
    dirty = pool.take(BufferKind(32, 3))
    assert bool((dirty == 7).all())
    pool.give_back(dirty)
    assert not pool.take_zeros(BufferKind(32, 3)).any()
    assert not pool.take_zeros(BufferKind(32, 3)).any()
    assert pool.allocated_bytes == 2 * 12 * 32


def test_buffers_of_kinds_that_nobody_asks_for_are_let_go_of() -> None:
    pool = BufferPool()
    kept, free = pool.take(BufferKind(32, 1)), pool.take(BufferKind(32, 1))
    pool.give_back(free)
    pool.forget([BufferKind(32, 1)])
    assert pool.allocated_bytes == 4 * 32  # the one in use
    wide = pool.take_zeros(BufferKind(32, 2))
    assert wide.shape == (2, 32) and pool.allocated_bytes == 3 * 4 * 32
    pool.give_back(kept)
    pool.give_back(wide)
    assert pool.allocated_bytes == 2 * 4 * 32
    assert pool.take(BufferKind(32, 2)) is wide


def test_a_limit_is_for_new_buffers_only() -> None:
    pool = BufferPool()
    buffer = pool.take_within(BufferKind(32, 3), 12 * 32)
    assert buffer is not None
    assert pool.take_within(BufferKind(32, 3), 12 * 63) is None
    pool.give_back(buffer)
    assert pool.take_within(BufferKind(16, 3), 12 * 47) is None
    assert pool.take_within(BufferKind(32, 3), 0) is buffer
    assert pool.take_within(BufferKind(32, 3), 12 * 64) is not None
    assert pool.allocated_bytes == 12 * 64


def test_what_is_free_can_be_let_go_of() -> None:
    pool = BufferPool()
    kept, free = pool.take(BufferKind(32, 3)), pool.take(BufferKind(16, 3))
    pool.give_back(free)
    pool.clear()
    assert pool.allocated_bytes == 12 * 32
    assert pool.take(BufferKind(16, 3)) is not free
    pool.give_back(kept)
    assert pool.take(BufferKind(32, 3)) is kept


# -- accumulators -------------------------------------------------------------


def test_accumulators_are_kept_while_windows_use_them() -> None:
    pool = BufferPool()
    for _ in range(3):
        accumulator = pool.take(BufferKind(32, 1))
        pool.give_back(accumulator)
        pool.trim()
        assert pool.allocated_bytes == 4 * 32
        assert pool.take(BufferKind(32, 1)) is accumulator
        pool.give_back(accumulator)
    assert pool.allocated_bytes == 4 * 32


def test_trim_frees_what_the_window_did_not_use() -> None:
    pool = BufferPool()
    accumulators = [pool.take(BufferKind(32, 1)), pool.take(BufferKind(32, 1)), pool.take(BufferKind(48, 1))]
    assert pool.allocated_bytes == 4 * (32 + 32 + 48)
    for accumulator in accumulators:
        pool.give_back(accumulator)
    pool.trim()
    kept = pool.take(BufferKind(32, 1))
    pool.give_back(kept)
    pool.trim()
    assert pool.allocated_bytes == 4 * 32
    pool.trim()
    assert pool.allocated_bytes == 0
    assert pool.take(BufferKind(32, 1)) is not kept


def test_one_accumulator_serves_two_tiles_of_a_window() -> None:
    """Discarded and begun again within a window: no second one is made."""
    pool = BufferPool()
    accumulator = pool.take(BufferKind(32, 1))
    pool.give_back(accumulator)
    assert pool.take(BufferKind(32, 1)) is accumulator
    assert pool.allocated_bytes == 4 * 32


def test_what_is_out_during_a_trim_still_counts() -> None:
    pool = BufferPool()
    accumulator = pool.take(BufferKind(32, 1))
    pool.trim()
    pool.trim()
    assert pool.allocated_bytes == 4 * 32
    pool.give_back(accumulator)
    pool.trim()
    pool.trim()
    assert pool.allocated_bytes == 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_memory_is_where_the_kernels_step(device: str) -> None:
    allocate = allocator_on(torch.device(device))
    buffers, accumulators = BufferPool(allocate), BufferPool(allocate)
    buffer, accumulator = buffers.take_zeros(BufferKind(32, 3)), accumulators.take(BufferKind(32, 1))
    assert buffer.device.type == accumulator.device.type == device
    assert buffer.shape == (3, 32) and accumulator.shape == (1, 32)
    assert buffer.dtype == accumulator.dtype == torch.float32
    assert (buffers.allocated_bytes, accumulators.allocated_bytes) == (12 * 32, 4 * 32)


# -- slots --------------------------------------------------------------------


def at(offset: int, numel: int) -> SegmentLayout:
    return SegmentLayout(0, 0, offset, numel)


def test_slots_are_aligned_disjoint_and_counted() -> None:
    sizes = [32, 64, 96, 128]
    slots, allocated_bytes = cut_slots(CopyStreams(), sizes)
    assert allocated_bytes == 64 + 64 + 128 + 128
    views = [slot.view(torch.uint8, at(0, size)) for slot, size in zip(slots, sizes, strict=True)]
    assert all(view.data_ptr() % 64 == views[0].data_ptr() % 64 for view in views)
    for value, view in enumerate(views):
        view.fill_(value)
    assert [set(view.tolist()) for view in views] == [{0}, {1}, {2}, {3}]
    assert cut_slots(CopyStreams(), []) == ([], 0)


def test_slots_lose_little_to_a_pinned_allocator_that_rounds_up_to_powers_of_two() -> None:
    class Recorded(CopyStreams):
        def __init__(self) -> None:
            self.blocks: list[int] = []

        def allocate(self, num_bytes: int) -> torch.Tensor:
            self.blocks.append(num_bytes)
            return torch.empty(num_bytes, dtype=torch.uint8)

    for sizes in ([1 << 16] * 37, [1000 * 64] * 53 + [640], [64] * 3, [1 << 20, 64, 64]):
        transfer = Recorded()
        slots, _ = cut_slots(transfer, sizes)
        assert len(slots) == len(sizes) and sum(transfer.blocks) == sum(sizes)
        rounded = sum(1 << (block - 1).bit_length() for block in transfer.blocks)
        assert rounded <= 1.1 * sum(sizes)
        assert len(transfer.blocks) <= 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_slot_is_seen_as_its_tiles_dtype(dtype: torch.dtype) -> None:
    (_, slot), _ = cut_slots(CopyStreams(), [32, 48 * dtype.itemsize])
    whole = slot.view(dtype, at(0, 48)).copy_(torch.arange(48))
    part = slot.view(dtype, at(32, 7))
    assert part.dtype == dtype and part.is_contiguous()
    assert part.tolist() == [32, 33, 34, 35, 36, 37, 38]
    part.zero_()
    assert whole[32:39].tolist() == [0] * 7 and whole[31] == 31 and whole[39] == 39
    assert slot.last_publish is None

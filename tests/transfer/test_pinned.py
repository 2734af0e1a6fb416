"""Pinned memory takes what was asked for, and is unpinned before it is freed. A counting double stands for CUDA's
runtime; tests/optim/test_device.py has the real one."""

from __future__ import annotations

import gc
import types

import pytest
import torch

import longshore
from longshore.layout.memory import LANDING_SLOTS
from longshore.layout.tiles import padded_bytes
from longshore.tiles.memory import cut_slots
from longshore.transfer import CopyStreams
from longshore.transfer.host_memory import PinnedPool, allocate_pinned


class Runtime:
    """Counts the bytes that are pinned. With ``fails`` nothing can be."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 0
        if not self.fails:
            self.pinned[address] = num_bytes
        return 2 if self.fails else 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr("torch.cuda.cudart", lambda: made)
    monkeypatch.setattr("torch.cuda.check_error", check)
    return made


def check(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"CUDA error {code}")


def test_as_many_bytes_are_pinned_as_were_asked_for(runtime: Runtime) -> None:
    """1.1 MiB would be 2 MiB in torch's allocator; a view keeps all of it pinned."""
    memory = allocate_pinned(1_153_434)
    assert memory.dtype == torch.uint8 and memory.shape == (1_153_434,) and not memory.any()
    assert runtime.pinned == {memory.data_ptr(): 1_153_434}
    view = memory[100:200].fill_(3)
    del memory
    gc.collect()
    assert sum(runtime.pinned.values()) == 1_153_434 and view.eq(3).all()
    del view
    gc.collect()
    assert runtime.pinned == {}
    assert allocate_pinned(0).numel() == 0 and runtime.pinned == {}


def test_a_pool_gives_memory_again_once_nothing_has_it(runtime: Runtime) -> None:
    pool = PinnedPool()
    wide = torch.empty(7, 5, dtype=torch.bfloat16)
    first = pool.empty_like(wide)
    assert first.shape == (7, 5) and first.is_contiguous() and first.dtype == torch.bfloat16 and not first._is_view()
    assert runtime.pinned == {first.data_ptr(): 70}
    address, view = first.data_ptr(), first[1:]
    del first
    second = pool.empty_like(wide)  # the view has the first one's memory still
    assert second.data_ptr() != address and len(runtime.pinned) == 2
    del view
    turned = pool.empty_like(wide.view(5, 7).t())  # as many bytes, in another order
    assert turned.data_ptr() == address and turned.shape == (7, 5) and turned.stride() == (1, 7)
    assert pool.empty_like(torch.empty(0, 3)).shape == (0, 3) and len(runtime.pinned) == 2
    # What was lent may outlive the pool, and all of it is unpinned in the end.
    del pool
    turned.fill_(3)
    del second, turned
    gc.collect()
    assert runtime.pinned == {}


def test_slots_of_unlucky_sizes(runtime: Runtime) -> None:
    """Three slots of 5 MiB: blocks of powers of two would take 24."""

    class Pinned(CopyStreams):
        def allocate(self, num_bytes: int) -> torch.Tensor:
            return allocate_pinned(num_bytes)

    slots, counted = cut_slots(Pinned(), [5 << 20] * 3)
    assert len(slots) == 3 and sum(runtime.pinned.values()) == counted == 15 << 20


def test_torchs_allocator_is_used_where_the_driver_pins_nothing_that_exists(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.fails = True
    asked = []
    zeros = torch.zeros

    def recorded(*size: int, pin_memory: bool = False, **options: object) -> torch.Tensor:
        asked.append((*size, pin_memory))
        return zeros(*size, **options)

    monkeypatch.setattr(
        "longshore.transfer.host_memory.torch", types.SimpleNamespace(**{**vars(torch), "zeros": recorded})
    )
    assert allocate_pinned(1000).shape == (1000,)
    gc.collect()
    assert asked == [(1000, True)] and runtime.pinned == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("sizes", [[1000] * 7, [70_000, 33, 12_345]], ids=str)
def test_what_an_optimizer_pins_is_counted_and_made_at_start_up(
    sizes: list[int], release: bool, dtype: torch.dtype
) -> None:
    """On the simulated device, whose transfer is asked for the same memory as that of CUDA."""
    blocks: list[int] = []

    class Recorded(longshore.SimulatedTransfer):
        def allocate(self, num_bytes: int) -> torch.Tensor:
            blocks.append(num_bytes)
            return super().allocate(num_bytes)

    parameters: list[torch.Tensor] = [torch.nn.Parameter(torch.ones(numel, dtype=dtype)) for numel in sizes]
    offload = longshore.Offload(4096, transfer=Recorded())
    optimizer = longshore.AdamW(parameters, release_gradients=release, offload=offload)
    at_start = sum(blocks)
    for _ in range(2):
        for _ in range(2):
            torch.cat(parameters).float().pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = optimizer.host_bytes()
    assert sum(blocks) == at_start == found["gradients"] + found["staging"] > 0
    if release:  # every gradient has its place, which is aligned to 64 bytes, and later ones have a few for all
        assert found["gradients"] <= sum(sizes) * dtype.itemsize + 64 * len(sizes)
        largest = max(tile.layout.buffer_numel for tile in optimizer._core.members.store.tiles)
        assert found["staging"] == LANDING_SLOTS * padded_bytes(largest * dtype.itemsize)
    optimizer.close()

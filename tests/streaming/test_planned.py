"""Planned bytes of a model whose parameters rest on the host are those that the engine counts, and the allocator."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from on_device import device_type
from plan.counting_cases import counts
from ranks import Ranks
from torch import nn

import longshore
from longshore.plan.memory import streamed_bytes
from longshore.plan.reading import plan_of_module

pytestmark = pytest.mark.gpu

CASES: dict[str, tuple[Any, ...]] = {
    "fp32": ("fp32",),
    "bf16": ("bf16",),
    "two dtypes": ("mixed",),
    "tied": ("tied",),
    "frozen": ("frozen",),
    "spares": ("bf16", 1.0, "50%"),
    "two backwards": ("bf16", 1.0, 0, 2),
    "the engine's tiles": ("bf16", 1.0, 0, 1, "SGD", None),
}


@pytest.mark.parametrize("case", CASES)
def test_one_rank(case: str) -> None:
    counted, planned = counts(3, "streamed", *CASES[case])
    assert planned == counted
    assert counted["host"]["parameters"] >= counted["device"]["parameters"] > 0


@pytest.mark.parametrize("case", ["fp32", "bf16", "frozen", "spares", "two backwards"])
def test_two_ranks(case: str, two_devices: Ranks) -> None:
    for counted, planned in two_devices(counts, 3, "streamed", *CASES[case]):
        assert planned == counted
        assert counted["host"]["parameters"] > 0 and not counted["device"]


def test_memory_of_the_device() -> None:
    """What the device's allocator has given at most, in forward without activations, is what was planned."""
    device = torch.device(device_type())
    numel = 1 << 18  # of blocks beside which nothing else counts
    blocks = nn.Sequential(*(nn.Linear(512, numel // 512, bias=False) for _ in range(5)))
    model = nn.Sequential(blocks, nn.Linear(512, 256))
    planned = streamed_bytes(plan_of_module(model, "wide"))
    gc.collect()
    torch.accelerator.synchronize()
    allocator = torch.get_device_module(device)
    before = allocator.memory_allocated()
    handle = longshore.stream(model, device)
    with torch.no_grad():
        for _ in range(3):
            model(torch.ones(1, 512, device=device))
        torch.accelerator.synchronize()
        allocator.reset_peak_memory_stats()
        model(torch.ones(1, 512, device=device))
        peak = allocator.max_memory_allocated() - before
    assert handle.counts.resident_bytes == planned == 4 * (2 * numel + 513 * 256)
    assert planned <= peak < planned + 64 * 1024
    handle.close()


@pytest.mark.parametrize("release", [False, True])
def test_memory_of_gradients_on_the_host(release: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is pinned in its exact size, and each step takes that of the one before."""
    asked: list[int] = []

    def counted(num_bytes: int) -> torch.Tensor:
        asked.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    blocks = nn.Sequential(*(nn.Linear(33, 33) for _ in range(4)))
    model = nn.Sequential(blocks, nn.Linear(33, 5)).bfloat16()
    device = torch.device(device_type())
    handle = longshore.stream(model, device)
    monkeypatch.setattr("longshore.transfer.host_memory.allocate_pinned", counted)
    optimizer = longshore.AdamW(model.parameters(), release_gradients=release)
    for _ in range(4):
        model(torch.ones(3, 33, device=device, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sorted(asked) == sorted(each.nbytes for each in model.parameters())
    optimizer.close()
    handle.close()

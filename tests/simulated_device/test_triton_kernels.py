"""State that stays on the simulated accelerator: its kernels run in Triton's interpreter, later, on streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from on_device import busy_stream, keep_busy
from support import batch, small_model

import longshore
from longshore.kernels import DeviceKernels
from longshore.tiles import MASTER
from simulated_device import counts, native

pytestmark = [pytest.mark.simulated, pytest.mark.triton]
DEVICE = torch.device("sim", 0)
NUMEL = 100


@pytest.fixture(autouse=True)
def _as_new() -> Iterator[None]:
    yield
    native().set_delays(0, 0, 0)
    torch.accelerator.synchronize()


def test_a_launch_runs_later_on_the_current_stream() -> None:
    kernels = DeviceKernels(DEVICE)
    source, target = torch.arange(100.0, device=DEVICE), torch.zeros(100, device=DEVICE)
    torch.accelerator.synchronize()
    stream = torch.Stream(DEVICE)
    with stream, busy_stream(0):
        native().reset_counts()
        kernels.accumulate(target, source, add=True)
        assert counts() == {**dict.fromkeys(counts(), 0), "launches": 1}
        event = stream.record_event()
        before = event.query()
    assert not before
    event.synchronize()
    assert torch.equal(target.cpu(), torch.arange(100.0))


def test_a_launch_keeps_no_tensor() -> None:
    """As with CUDA: what is freed on another stream than the one that reads it is overwritten meanwhile."""
    kernels, allocated_on = DeviceKernels(DEVICE), torch.accelerator.current_stream(DEVICE)
    source, target = torch.ones(NUMEL, device=DEVICE), torch.zeros(NUMEL, device=DEVICE)
    torch.accelerator.synchronize()
    with torch.Stream(DEVICE), busy_stream(0):
        kernels.accumulate(target, source, add=True)
        del source
        allocated_on.synchronize()
    torch.accelerator.synchronize()
    assert target.isnan().all()


def test_memory_of_the_host_is_out_of_reach() -> None:
    kernels = DeviceKernels(DEVICE)
    target, elsewhere = torch.zeros(NUMEL, device=DEVICE), torch.ones(NUMEL)
    kernels._triton.accumulate[(1,)](target.data_ptr(), elsewhere.data_ptr(), 1, NUMEL, 1)
    with pytest.raises(RuntimeError, match=f"accesses {elsewhere.data_ptr():#x}, which is not memory of its device"):
        torch.accelerator.synchronize()


@pytest.mark.quick(1)
@pytest.mark.parametrize("offload", [{"device": "none"}, {"ratio": 0.3}], ids=str)
@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_whatever_the_delays_the_weights_are_the_same(seed: int, release: bool, offload: dict[str, Any]) -> None:
    models = [small_model(torch.bfloat16).to(DEVICE) for _ in range(2)]
    optimizers = [
        longshore.AdamW(model.parameters(), lr=3e-2, release_gradients=release, offload=longshore.Offload(64, **place))
        for model, place in zip(models, ({}, offload), strict=True)
    ]
    native().set_delays(seed, kernel_us=2000, copy_us=2000)
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            for part in range(2):
                model(batch(2 * step + part, torch.bfloat16).to(DEVICE)).float().pow(2).sum().backward()
            optimizer.clip_grad_norm_(0.3)
            optimizer.step()
            optimizer.zero_grad()
        for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(ours, theirs)
    assert optimizers[1]._core.members.store.tiles.device_bytes()["state"] > 0


def test_a_snapshot_has_what_a_stream_is_still_computing() -> None:
    """Whoever reads it does so on another stream."""
    parameter = torch.nn.Parameter(torch.ones(NUMEL, device=DEVICE, dtype=torch.bfloat16))
    optimizer = longshore.AdamW([parameter], offload=longshore.Offload(device="none"))
    states = optimizer._core.members.store.states.ranges
    stream = torch.Stream(DEVICE)
    with stream:
        for _ in range(2):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        torch.accelerator.synchronize()
        former = states.read(0, MASTER)
        parameter.grad = torch.ones_like(parameter)
        keep_busy(800_000_000)
        optimizer.step()
        snapshot = states.snapshot([(0, MASTER)], 0)
    found = snapshot.read_range(0, MASTER)
    assert not torch.equal(found, former)
    assert torch.equal(found, states.read(0, MASTER))

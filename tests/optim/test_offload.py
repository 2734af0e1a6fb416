"""``Offload(device=...)``: where the state is, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import batch, loss_of, same_weights, small_model
from torch import nn

import longshore
from longshore.kernels import DeviceKernels, HostKernels, Kernels
from longshore.layout.tiles import Home, Spec
from longshore.optim import Offload
from longshore.tiles import MASTER, RangeStates, TierSettings, Tiles
from longshore.transfer import CopyStreams, DeviceStreams, SimulatedTransfer
from tests.kernels.device_kernels import DEVICE, ON_CUDA, device_kernels

pytestmark = [pytest.mark.gpu] if ON_CUDA else []

HYPER: dict[str, Any] = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


@dataclass(frozen=True)
class OnDevice(Offload):
    """``device="none"`` with the kernels of a CUDA device, which here may be interpreted."""

    kernels: Any = None

    def kernels_for(self, device: torch.device) -> Kernels:
        return self.kernels


def backward(model: nn.Module, step: int, dtype: torch.dtype = torch.float32) -> None:
    model(batch(step, dtype).to(DEVICE)).float().pow(2).sum().backward()


@pytest.fixture(scope="module")
def device() -> Iterator[DeviceKernels]:
    with device_kernels() as kernels:
        yield kernels


@pytest.mark.covering(1)
@pytest.mark.quick(0)
@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_state_on_the_device_gives_the_same_weights(device: DeviceKernels, dtype: torch.dtype, release: bool) -> None:
    """The whole optimizer on device kernels: windows of several backwards, clipping, writes, state."""
    models, norms, states = [], [], []
    for offload in (Offload(tile_numel=300), OnDevice(tile_numel=300, device="none", kernels=device)):
        model = small_model(dtype).to(DEVICE)
        optimizer = longshore.AdamW(model.parameters(), **HYPER, release_gradients=release, offload=offload)
        for step, backwards in enumerate((1, 3)):
            for part in range(backwards):
                backward(model, 10 * step + part, dtype)
            norms.append(optimizer.clip_grad_norm_(0.3))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model[0].bias.add_(0.5)  # the parameter is the user's
        models.append(model)
        states.append(optimizer.state_dict()["state"])
        # As many gradients are added on the device as on the host.
        assert (optimizer._core.members.store.tiles.tier.sums.allocated_bytes > 0) is release
        optimizer.close()
    assert same_weights(*models)
    assert torch.equal(norms[0], norms[2]) and torch.equal(norms[1], norms[3]) and norms[0] > 0.3
    for index, entries in states[0].items():
        assert all(torch.equal(value, states[1][index][key]) for key, value in entries.items())


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    ("kind", "options"),
    [("Lion", {}), ("Adagrad", {}), ("SGD", {"lr": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True})],
    ids=str,
)
def test_every_optimizer_steps_on_the_device(device: DeviceKernels, kind: str, options: dict[str, Any]) -> None:
    models = []
    for offload in (Offload(tile_numel=600), OnDevice(tile_numel=600, device="none", kernels=device)):
        model = small_model().to(DEVICE)
        optimizer = getattr(longshore.optim, kind)(model.parameters(), weight_decay=0.1, offload=offload, **options)
        for step in range(2):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert same_weights(*models)
    untrained = small_model().to(DEVICE).parameters()
    assert not any(torch.equal(old, new) for old, new in zip(untrained, model.parameters(), strict=True))


def test_a_failed_addition_on_the_device_is_told_at_the_step(
    device: DeviceKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model().to(DEVICE)
    offload = OnDevice(device="none", kernels=device)
    optimizer = longshore.AdamW(model.parameters(), **HYPER, release_gradients=True, offload=offload)
    before = [parameter.clone() for parameter in model.parameters()]
    with monkeypatch.context() as broken:
        broken.setattr(device, "accumulate", lambda *_, **__: 1 / 0)
        for step in range(2):
            backward(model, step)
    for _ in range(2):  # until it is discarded
        with pytest.raises(longshore.GradientError, match="division by zero"):
            optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    optimizer.zero_grad()
    backward(model, 0)
    optimizer.step()
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_buffers_are_where_the_kernels_step_and_counted_at_home() -> None:
    class Elsewhere(HostKernels):
        device, asynchronous = torch.device("meta"), True

    settings = TierSettings(CopyStreams(), Elsewhere(threads=1), 16, hold_gradients=False, home=Home.DEVICE)
    store = Tiles([settings])
    store.add([Spec(0, 16, torch.float32)])
    RangeStates(store).write(0, MASTER, torch.zeros(16, device="meta"))
    (tile,) = store.tiles
    assert tile.buffer is not None and tile.buffer.device.type == "meta"
    assert store.host_bytes() == {"state": 0, "gradients": 0, "spares": 0, "staging": 0, "accumulators": 0}
    assert store.device_bytes() == {
        "state": 4 * tile.buffer.numel(),
        "gradients": 0,
        "spares": 0,
        "staging": 0,
        "accumulators": 0,
    }


def test_without_offload_nothing_is_copied_from_a_simulated_device() -> None:
    transfer = SimulatedTransfer(max_delay_s=0.0)
    model = small_model()
    optimizer = longshore.AdamW(model.parameters(), offload=Offload(device="none", transfer=transfer))
    assert isinstance(optimizer._core.members.store.tiles.streams, CopyStreams)
    loss_of(model, 0).backward()
    optimizer.step()
    assert transfer.down.delays == transfer.up.delays == 0
    staged = longshore.AdamW(small_model().parameters(), offload=Offload(transfer=transfer))
    assert staged._core.members.store.tiles.streams is transfer


def test_cpu_parameters_are_stepped_by_the_host_kernels_either_way() -> None:
    for where in ("cpu", "none"):
        kernels = Offload(device=where, threads=2).kernels_for(torch.device("cpu"))
        assert isinstance(kernels, HostKernels) and kernels.threads == 2
        assert isinstance(Offload(device=where).streams_to(torch.device("cpu")), CopyStreams)


@pytest.mark.parametrize("device_name", ["nvme", "cuda", "", None, torch.device("cpu")])
def test_other_places_are_refused(device_name: Any) -> None:
    with pytest.raises(ValueError, match=r"'cpu' \(host memory\) or 'none' .*not "):
        Offload(device=device_name)


def test_a_transfer_that_would_have_nothing_to_copy_is_refused() -> None:
    transfer = DeviceStreams.__new__(DeviceStreams)
    with pytest.raises(ValueError, match="device='none' copies nothing, and a DeviceStreams was given"):
        Offload(device="none", transfer=transfer)
    for other in ("cuda", 5, object()):
        with pytest.raises(ValueError, match="device='none' copies nothing"):
            Offload(device="none", transfer=other)  # type: ignore[arg-type]
    assert Offload(transfer=transfer).transfer is transfer


@pytest.mark.parametrize("option", [{"threads": 2}, {"cpu_set": [0]}, {"speculation_memory": "100%"}])
def test_host_threads_that_would_not_step_are_refused(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(ValueError, match=f"no host thread does: leave {name} out"):
        Offload(device="none", **option).kernels_for(torch.device("cuda"))

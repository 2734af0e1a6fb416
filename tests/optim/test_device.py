"""The optimizers on a device: the same weights as the plain loop on the CPU."""

from __future__ import annotations

import gc

import pytest
import torch
from on_device import NONE, device_type, keep_busy, needs_triton
from plain_muon import PlainMuon
from support import PlainLoop, batch, small_model
from torch import Tensor, nn

import longshore
from longshore.layout.tiles import SegmentLayout

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def captured(model: nn.Module) -> list[list[Tensor]]:
    """Each parameter's increments, copied on the device before longshore's hooks see them."""
    seen: list[list[Tensor]] = [[] for _ in model.parameters()]
    for index, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda p, index=index: seen[index].append(p.grad.clone()))
    return seen


def backward(model: nn.Module, step: int, dtype: torch.dtype) -> None:
    model(batch(step, dtype).to(device_type())).float().pow(2).sum().backward()


@pytest.mark.quick(0)
@pytest.mark.covering(2)
@pytest.mark.parametrize("device", ["cpu", NONE])
@pytest.mark.parametrize("tile_numel", [256, 1 << 22])
@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_default_mode(dtype: torch.dtype, backwards: int, tile_numel: int, device: str) -> None:
    plain_model, model = small_model(dtype), small_model(dtype).to(device_type())
    plain = PlainLoop(plain_model.parameters(), lr=3e-2)
    offload = longshore.Offload(tile_numel=tile_numel, device=device)
    optimizer = longshore.AdamW(model.parameters(), lr=3e-2, offload=offload)
    for step in range(5):
        for part in range(backwards):
            backward(model, 10 * step + part, dtype)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        plain.step([parameter.grad.cpu() for parameter in model.parameters()])
        keep_busy(20_000_000)  # the step must wait for what the stream still does
        optimizer.step()
        optimizer.zero_grad()
        for ours, theirs in zip(model.parameters(), plain_model.parameters(), strict=True):
            assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("device", ["cpu", NONE])
@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_that_torch_cannot_see(dtype: torch.dtype, device: str, turns: bool) -> None:
    """``turns``: now and then a step is of other parameters than the one before."""
    plain_model, model = small_model(dtype), small_model(dtype).to(device_type())
    plain = PlainLoop(plain_model.parameters(), lr=3e-2)
    optimizer = longshore.AdamW(model.parameters(), lr=3e-2, offload=longshore.Offload(device=device))
    for step in range(5):
        backward(model, step, dtype)
        for place, parameter in enumerate(model.parameters()):
            if turns and (place == 0) == (step // 2 % 2 == 0):
                parameter.grad = None
        plain.step([None if each.grad is None else each.grad.cpu() for each in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        for index, (ours, theirs) in enumerate(zip(model.parameters(), plain_model.parameters(), strict=True)):
            assert torch.equal(ours.cpu(), theirs)
            if step % 2:
                ours.data.clamp_(-0.1, 0.1)
                theirs.data.clamp_(-0.1, 0.1)
                plain.refresh(index)


@pytest.mark.medium
@pytest.mark.covering(2)
@pytest.mark.parametrize("device", ["cpu", NONE])
@pytest.mark.parametrize("tile_numel", [256, 1 << 22])
@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_released_gradients(dtype: torch.dtype, backwards: int, tile_numel: int, device: str) -> None:
    plain_model, model = small_model(dtype), small_model(dtype).to(device_type())
    plain = PlainLoop(plain_model.parameters(), lr=3e-2)
    seen = captured(model)
    offload = longshore.Offload(tile_numel=tile_numel, device=device)
    optimizer = longshore.AdamW(model.parameters(), lr=3e-2, release_gradients=True, offload=offload)
    for step in range(5):
        for part in range(backwards):
            keep_busy(20_000_000)
            backward(model, 10 * step + part, dtype)
        norm = optimizer.clip_grad_norm_(0.5)
        total = []
        for increments in seen:
            so_far = increments[0].cpu().float()
            for increment in increments[1:]:
                so_far = so_far + increment.cpu().float()
            total.append(so_far)
            increments.clear()
        plain.step(total, scale=torch.clamp(0.5 / (norm + 1e-6), max=1.0).item())
        optimizer.step()
        for ours, theirs in zip(model.parameters(), plain_model.parameters(), strict=True):
            assert torch.equal(ours.cpu(), theirs)


@pytest.mark.covering(2)
@pytest.mark.parametrize("clip", [1e9, 1e-3])
@pytest.mark.parametrize("tile_numel", [256, 1 << 22])
@pytest.mark.parametrize("dtype", DTYPES)
def test_stepping_ahead(dtype: torch.dtype, tile_numel: int, clip: float) -> None:
    """With spare buffers and without: the same bits, while the device is still busy with backward."""
    models = [small_model(dtype).to(device_type()) for _ in range(2)]
    optimizers = [
        longshore.AdamW(
            model.parameters(),
            lr=3e-2,
            release_gradients=True,
            offload=longshore.Offload(tile_numel=tile_numel, speculation_memory=memory),
        )
        for model, memory in zip(models, (0, "100%"), strict=True)
    ]
    begun = kept = 0
    for step in range(5):
        for model in models:
            keep_busy(20_000_000)
            backward(model, step, dtype)
        norms = [optimizer.clip_grad_norm_(clip) for optimizer in optimizers]
        assert torch.equal(*norms)
        for optimizer in optimizers:
            optimizer.step()
        record = optimizers[1].speculation
        assert record is not None
        begun, kept = begun + record.begun, kept + record.kept
        for a, b in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(a, b)
    assert begun > 0 and (kept > 0) == (clip == 1e9)


@pytest.mark.medium
@pytest.mark.covering(2)
@needs_triton
@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("ratio", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_some_state_stays_on_the_device(dtype: torch.dtype, ratio: float, release: bool) -> None:
    """Stepped by the device's kernels, beside the host's: the same bits, and so are the states."""
    models = [small_model(dtype).to(device_type()) for _ in range(2)]
    optimizers = [
        longshore.AdamW(
            model.parameters(),
            lr=3e-2,
            release_gradients=release,
            offload=longshore.Offload(tile_numel=256, ratio=share, speculation_memory="100%" if release else 0),
        )
        for model, share in zip(models, (1.0, ratio), strict=True)
    ]
    for step, backwards in enumerate((1, 2, 1, 1)):
        for model, optimizer in zip(models, optimizers, strict=True):
            for part in range(backwards):
                backward(model, 10 * step + part, dtype)
            optimizer.clip_grad_norm_(0.3)
            optimizer.step()
            optimizer.zero_grad()
        for a, b in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(a, b)
    whole, split = (optimizer.state_dict()["state"] for optimizer in optimizers)
    for index, entries in whole.items():
        assert all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(split[index][key])) for key, value in entries.items()
        )
    assert optimizers[1]._core.members.store.tiles.device_bytes()["state"] > 0


def test_released_gradients_take_no_device_memory() -> None:
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(16)]).to(device_type())
    parameter_bytes = 4 * 2048 * 2048
    optimizer = longshore.AdamW(model.parameters(), release_gradients=True)
    optimizer._core.members.store.tiles.streams.down.limit_bytes = 2 * parameter_bytes
    x = torch.randn(4, 2048, device=device_type())
    for _ in range(2):
        torch.accelerator.synchronize()
        gc.collect()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        model(x).sum().backward()
        torch.accelerator.synchronize()
        assert torch.accelerator.max_memory_allocated() - before < 5 * parameter_bytes
        optimizer.step()


@needs_triton
def test_without_offload_state_is_on_the_device() -> None:
    model = small_model(torch.bfloat16).to(device_type())
    optimizer = longshore.AdamW(model.parameters(), offload=longshore.Offload(device="none"))
    backward(model, 0, torch.bfloat16)
    optimizer.step()
    assert all(
        tile.buffer is not None and tile.buffer.device.type == device_type()
        for tile in optimizer._core.members.store.tiles
    )
    assert set(optimizer.host_bytes().values()) == {0}
    parameter = next(model.parameters())
    state = optimizer.state[parameter]
    assert not any(value.device.type == device_type() for value in state.values())
    assert torch.equal(state["master"].bfloat16(), parameter.cpu())
    before = optimizer.state_dict()
    optimizer.load_state_dict(before)
    for key, value in optimizer.state[parameter].items():
        assert torch.equal(value, state[key])


def test_pinned_memory_is_made_at_start_up() -> None:
    model = small_model().to(device_type())
    optimizer = longshore.AdamW(model.parameters(), release_gradients=True)
    slot = optimizer._core.members.store.tiles.tiles[0].slot
    assert slot is not None
    assert slot.view(torch.float32, SegmentLayout(0, 0, 0, 4)).is_pinned()
    held = optimizer.host_bytes()["gradients"]
    backward(model, 0, torch.float32)
    backward(model, 1, torch.float32)
    optimizer.step()
    assert optimizer.host_bytes()["gradients"] == held


def test_grad_scaler() -> None:
    model = small_model(torch.float32).to(device_type())
    plain_model = small_model(torch.float32)
    plain = PlainLoop(plain_model.parameters(), lr=1e-2)
    optimizer = longshore.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device_type(), init_scale=256.0)
    for step in range(3):
        with torch.autocast(device_type(), torch.float16):
            loss = model(batch(step).to(device_type())).float().pow(2).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        plain.step([parameter.grad.cpu() for parameter in model.parameters()])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        for ours, theirs in zip(model.parameters(), plain_model.parameters(), strict=True):
            assert torch.equal(ours.cpu(), theirs)


def test_parameters_on_two_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="one device"):
        longshore.AdamW([nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, device=device_type()))])


@pytest.mark.quick(0)
@pytest.mark.covering(2)
@pytest.mark.parametrize(
    ("release", "memory", "device"),
    [
        (False, 0, "cpu"),
        (True, 0, "cpu"),
        (True, "100%", "cpu"),
        pytest.param(False, 0, "none", marks=NONE.marks),
        pytest.param(True, 0, "none", marks=NONE.marks),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_muon(dtype: torch.dtype, release: bool, memory: int | str, device: str) -> None:
    """Newton-Schulz runs on the device, so the plain loop's does; everything elementwise has the bits of the CPU, also
    what is stepped ahead."""
    plain_model, model = small_model(dtype), small_model(dtype).to(device_type())
    groups, plain_groups = (
        [
            {"params": [each for each in of.parameters() if each.ndim == 2], "lr": 0.03},
            {"params": [each for each in of.parameters() if each.ndim != 2], "use_muon": False, "lr": 3e-3},
        ]
        for of in (model, plain_model)
    )
    plain = PlainMuon(plain_groups, on=torch.device(device_type()))
    seen = captured(model)
    offload = longshore.Offload(tile_numel=256, device=device, speculation_memory=memory)
    optimizer = longshore.Muon(groups, release_gradients=release, offload=offload)
    for step in range(5):
        backward(model, step, dtype)
        gradients = [each.pop().cpu() for each in seen]
        plain.step(dict(zip(plain_model.parameters(), gradients, strict=True)))
        keep_busy(20_000_000)
        optimizer.step()
        optimizer.zero_grad()
        for ours, theirs in zip(model.parameters(), plain_model.parameters(), strict=True):
            assert torch.equal(ours.cpu(), theirs), step
    record = optimizer.speculation
    assert (record is not None and record.kept == record.begun > 1) if memory else record is None
    assert (optimizer.host_bytes()["state"] > 0) == (device == "cpu")

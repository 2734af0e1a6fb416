"""``Offload(ratio=...)``: part of the state stays on the device, and no bit changes."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import KIND_NAMES, KINDS, Kind, PlainLoop, loss_of, same_weights, small_model
from torch import nn

import longshore
from longshore.errors import BrokenStateError, GradientError
from longshore.kernels import HostKernels, Kernels
from longshore.layout.tiles import NORM_BLOCK_NUMEL
from longshore.optim import Offload
from longshore.tiles import Tier, TileState
from longshore.tiles.in_place import InPlace
from tests.kernels.device_kernels import ON_CUDA, device_kernels

RATIOS = [0.0, 0.1, 0.3]


def offload(ratio: float, seed: int = 0, **options: Any) -> Offload:
    transfer = longshore.SimulatedTransfer(seed=seed)
    return Offload(**{"tile_numel": 100, "transfer": transfer, "ratio": ratio, **options})


def parts_of(optimizer: Any) -> tuple[Tier, Tier]:
    """What stays on the device, and what is on the host."""
    device, host = optimizer._core.members.store.tiles.tiers
    return device, host


def trained(optimizer: Any, model: nn.Module, dtype: torch.dtype, clip: float | None) -> list[Any]:
    """Windows of one to three backwards, a write by the user, an idle parameter; what they left."""
    norms = []
    for step, backwards in enumerate((1, 3, 2, 1)):
        for part in range(backwards):
            loss_of(model, 10 * step + part, dtype).backward()
        if step == 1:
            model[0].bias.grad = None
        if clip is not None:
            norms.append(optimizer.clip_grad_norm_(clip))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model[2].weight.mul_(0.5)
    return [norms, optimizer.state_dict()["state"], [parameter.detach() for parameter in model.parameters()]]


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.quick(0)
@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES)
@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("ratio", RATIOS)
def test_parity(kind: Kind, release: bool, ratio: float) -> None:
    results = []
    for settings in (Offload(tile_numel=100), offload(ratio, speculation_memory="100%" if release else 0)):
        model = small_model(torch.bfloat16)
        optimizer = kind.make(model.parameters(), release_gradients=release, offload=settings)
        results.append(trained(optimizer, model, torch.bfloat16, 0.3))
        optimizer.close()
    assert_same(results[1], results[0])


@dataclass(frozen=True)
class OnDevice(Offload):
    """What stays is stepped by the kernels of a CUDA device, which here may be interpreted."""

    kernels: Any = None

    def kernels_for(self, device: torch.device) -> Kernels:
        return self.kernels if self.device == "none" else HostKernels()


@pytest.mark.skipif(ON_CUDA, reason="the simulated device is the CPU")
def test_parity_with_the_kernels_of_a_device() -> None:
    results = []
    with device_kernels() as kernels:
        split = OnDevice(300, transfer=longshore.SimulatedTransfer(seed=1), ratio=0.3, kernels=kernels)
        for settings in (Offload(tile_numel=300), split):
            model = small_model()
            optimizer = longshore.AdamW(model.parameters(), lr=1e-2, release_gradients=True, offload=settings)
            results.append(trained(optimizer, model, torch.float32, 0.3))
            optimizer.close()
    assert_same(results[1], results[0])


class Wide(nn.Module):
    """One parameter of several blocks, between small ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(5))
        self.wide = nn.Parameter(torch.randn(3 * NORM_BLOCK_NUMEL + 77))
        self.last = nn.Parameter(torch.randn(9))

    def loss(self) -> torch.Tensor:
        return (self.wide**2).mean() * self.first.sum() + (self.last**3).sum()


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.9])
def test_a_parameter_in_both_parts(ratio: float) -> None:
    """It is cut where the norm's blocks end: the norm is the same bits too, and so are states, read and written."""
    results = []
    for settings in (Offload(), offload(ratio, tile_numel=10_000)):
        model = Wide()
        make = functools.partial(longshore.AdamW, model.parameters(), lr=1e-2, release_gradients=True, offload=settings)
        if settings.ratio == 0.9:
            with pytest.warns(UserWarning, match="ratio=0.9 leaves 10% .* and 0% stays there"):
                optimizer = make()
        else:
            optimizer = make()
        for _ in range(3):
            model.loss().backward()
            norm = optimizer.clip_grad_norm_(0.1)
            optimizer.step()
        if settings.ratio < 1.0:
            parts = [part for tier in parts_of(optimizer) if (part := tier.parts[1])]
            assert len(parts) == (2 if ratio < 0.9 else 1)
            assert all(part[0][1].layout.parameter_offset % NORM_BLOCK_NUMEL == 0 for part in parts)
        optimizer.state[model.wide]["exp_avg"] = torch.arange(model.wide.numel(), dtype=torch.float32)
        model.loss().backward()
        optimizer.step()
        results.append([norm, optimizer.state_dict()["state"], [p.detach() for p in model.parameters()]])
        optimizer.close()
    assert_same(results[1], results[0])


@pytest.mark.parametrize("ratio", [0.2, 0.5, 1.0])
def test_the_share_is_counted(ratio: float) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(10)))
    optimizer = longshore.AdamW(model.parameters(), release_gradients=True, offload=offload(ratio, tile_numel=64 * 64))
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    whole = 3 * 4 * 64 * 64 * 10
    assert optimizer.host_bytes()["state"] == ratio * whole
    assert optimizer._core.members.store.tiles.device_bytes().get("state", 0) == (1 - ratio) * whole
    if ratio < 1.0:  # what comes last in backward stays
        device, _ = parts_of(optimizer)
        assert [bool(device.parts[record.index]) for record in optimizer._core.members.records] == [True] * round(
            10 - 10 * ratio
        ) + [False] * round(10 * ratio)
    optimizer.close()


@pytest.mark.parametrize(("numels", "ratio"), [([627, 33], 0.4), ([NORM_BLOCK_NUMEL - 1], 0.0001), ([10, 990], 0.9)])
def test_a_share_that_does_not_stay_on_the_device_is_said(numels: list[int], ratio: float) -> None:
    parameters = [nn.Parameter(torch.randn(numel)) for numel in numels]
    kept = 0.01 if numels[0] == 10 else 0.0
    said = f"ratio={ratio:g} leaves {1 - ratio:.0%} of the optimizer's state on the device, and {kept:.0%} stays there"
    with pytest.warns(UserWarning, match=re.escape(said)):
        optimizer = longshore.AdamW(parameters, offload=offload(ratio))
    device, _ = parts_of(optimizer)
    assert sum(tile.layout.numel for tile in device.tiles) == round(kept * sum(numels))
    optimizer.close()


def test_states_move_between_ratios() -> None:
    states = []
    for ratio in (1.0, 0.3, 0.1, 0.0):
        model = small_model()
        optimizer = longshore.AdamW(model.parameters(), lr=1e-2, release_gradients=True, offload=offload(ratio))
        if states:
            optimizer.load_state_dict(states[-1])
            assert_same(optimizer.state_dict()["state"], states[-1]["state"])
        else:
            loss_of(model, 0).backward()
            optimizer.step()
        states.append(optimizer.state_dict())
        optimizer.close()


def test_groups_that_come_later() -> None:
    models = []
    for settings in (Offload(tile_numel=100), offload(0.02)):
        model = small_model()
        model[3].requires_grad_(False)
        optimizer = longshore.AdamW(model[0].parameters(), lr=1e-2, release_gradients=True, offload=settings)
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 1e-3, "weight_decay": 0.3})
        optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 1e-4})
        for step in range(4):
            model[3].requires_grad_(step >= 2)
            loss_of(model, step).backward()
            optimizer.step()
        optimizer.close()
        models.append(model)
    assert same_weights(*models)


def pair() -> tuple[Any, nn.Module]:
    model = small_model()
    optimizer = longshore.AdamW(model.parameters(), lr=1e-2, release_gradients=True, offload=offload(0.2))
    assert all(tier.tiles for tier in parts_of(optimizer))
    return optimizer, model


@pytest.mark.parametrize("step_between", [False, True])
def test_a_discarded_window_leaves_nothing_in_either_part(step_between: bool) -> None:
    optimizer, model = pair()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss_of(model, 0).backward()
    optimizer.zero_grad()
    assert {optimizer._core.members.store.arrivals(record.index) for record in optimizer._core.members.records} == {0}
    if step_between:
        optimizer.step()
    assert_same([parameter.detach() for parameter in model.parameters()], before)
    twin = small_model()
    loop = PlainLoop(twin.parameters(), lr=1e-2)
    for each in (model, twin):
        loss_of(each, 1).backward()
    optimizer.step()
    loop.step_on_grads()
    assert same_weights(model, twin)
    optimizer.close()


def test_neither_part_steps_unless_both_can(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, model = pair()
    loss_of(model, 3).backward()
    optimizer.step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss_of(model, 0).backward()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(parts_of(optimizer)[1].kernels, "sum_of_two", fail, raising=False)
        loss_of(model, 1).backward()  # a second arrival, which the host cannot add
        with pytest.raises(GradientError, match="out of memory"):
            optimizer.step()
    assert_same([parameter.detach() for parameter in model.parameters()], before)
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    optimizer.step()
    optimizer.close()


def test_half_a_step_is_said_until_state_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, model = pair()
    loss_of(model, 0).backward()
    optimizer.step()
    state = optimizer.state_dict()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    _, host = parts_of(optimizer)
    loss_of(model, 1).backward()

    run = InPlace.run

    def fail(self: InPlace) -> None:
        if self._tier is host:
            raise RuntimeError("the host is gone")
        run(self)

    with monkeypatch.context() as patched:
        patched.setattr(InPlace, "run", fail)
        with pytest.raises(RuntimeError, match="the host is gone"):
            optimizer.step()
    assert all(tile.state is not TileState.BROKEN for tile in host.tiles)
    for call in (optimizer.step, optimizer.zero_grad, optimizer.state_dict):
        with pytest.raises(BrokenStateError, match="the host is gone"):
            call()
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    other, twin = pair()
    twin.load_state_dict(weights)
    other.load_state_dict(state)
    for each in (model, twin):
        loss_of(each, 2).backward()
    optimizer.step()
    other.step()
    assert same_weights(model, twin)
    optimizer.close()
    other.close()


def test_an_interrupt_between_the_two_parts_is_half_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, model = pair()
    loss_of(model, 0).backward()
    device, _ = parts_of(optimizer)
    run = InPlace.run

    def interrupted(self: InPlace) -> None:
        run(self)
        if self._tier is device:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(InPlace, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    with pytest.raises(BrokenStateError, match="KeyboardInterrupt"):
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("ratio", [-0.1, 1.5, True, "half", None])
def test_what_is_no_share_is_refused(ratio: Any) -> None:
    with pytest.raises(ValueError, match=r"ratio is the share of the state that is on the host, from 0.0 to 1.0"):
        Offload(ratio=ratio)


def test_nothing_to_share_is_refused() -> None:
    with pytest.raises(ValueError, match=r"leave ratio 0.5 out, or use device='cpu'"):
        Offload(ratio=0.5, device="none")


def test_cpu_parameters_have_one_memory() -> None:
    model = small_model()
    optimizer = longshore.AdamW(model.parameters(), offload=Offload(ratio=0.5))
    assert len(optimizer._core.members.store.tiles.tiers) == 1
    optimizer.close()

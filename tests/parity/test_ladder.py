"""The weights are those of plain PyTorch, by ``torch.equal``: docs/optimizer.md, "What the weights are"."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import KIND_NAMES, KINDS, Kind, PlainLoop, batch, loss_of, same_weights, simulated, small_model, twins
from torch import Tensor, nn

import longshore

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Tile sizes; simulated streams with single-element tiles sleep thousands of times.
PLACES = [
    *[pytest.param("direct", tile_numel) for tile_numel in (1, 7, 100, 1 << 22)],
    *[pytest.param("simulated", tile_numel) for tile_numel in (100, 1 << 22)],
    pytest.param("none", 100),
    *[pytest.param("simulated", tile_numel, marks=pytest.mark.slow) for tile_numel in (1, 7)],
]
HYPER: dict[str, Any] = KINDS[0].options
# The others differ in their kernel and in the arrays of a state buffer, not in how bytes move.
EVERYWHERE = [
    *[pytest.param(KINDS[0], *place.values, marks=place.marks, id=f"AdamW-{place.values}") for place in PLACES],
    *[
        pytest.param(kind, *place, id=f"{name}-{place}")
        for kind, name in zip(KINDS[1:], KIND_NAMES[1:], strict=True)
        for place in (("direct", 7), ("simulated", 100))
    ],
]
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES)


def offload(kind: str, tile_numel: int, threads: int = 2) -> longshore.Offload:
    if kind == "none":
        return longshore.Offload(tile_numel=tile_numel, threads=threads, device="none")
    if kind == "simulated":
        return simulated(seed=tile_numel, tile_numel=tile_numel, max_delay_s=0.0005)
    return longshore.Offload(tile_numel=tile_numel, threads=threads)


def increments(model: nn.Module, steps: list[int], dtype: torch.dtype) -> list[list[Tensor]]:
    """The gradient of each backward on its own."""
    found = []
    for step in steps:
        model.zero_grad()
        loss_of(model, step, dtype).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    model.zero_grad()
    return found


def summed(gradients: list[list[Tensor]]) -> list[Tensor]:
    """Added in float32, in order of arrival."""
    total = [gradient.float() for gradient in gradients[0]]
    for later in gradients[1:]:
        total = [one + other.float() for one, other in zip(total, later, strict=True)]
    return total


@pytest.mark.quick(0)
@pytest.mark.covering(2)
@pytest.mark.parametrize(("kind", "transfer", "tile_numel"), EVERYWHERE)
@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_default_mode_steps_grad_as_found(
    dtype: torch.dtype, backwards: int, kind: Kind, tile_numel: int, transfer: str
) -> None:
    plain_model, model = twins(dtype)
    plain = kind.loop(plain_model.parameters())
    optimizer = kind.make(model.parameters(), offload=offload(transfer, tile_numel))
    before = [parameter.clone() for parameter in model.parameters()]
    for step in range(4):
        for part in range(backwards):
            loss_of(plain_model, 10 * step + part, dtype).backward()
            loss_of(model, 10 * step + part, dtype).backward()
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(plain_model, model), step
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    if tile_numel == 100:
        assert len(optimizer._core.members.store.tiles) > 5


@pytest.mark.covering(2)
@pytest.mark.quick(1)
@pytest.mark.parametrize(("kind", "transfer", "tile_numel"), EVERYWHERE)
@pytest.mark.parametrize("backwards", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_released_gradients_are_added_in_float32(
    dtype: torch.dtype, backwards: int, kind: Kind, tile_numel: int, transfer: str
) -> None:
    plain_model, model = twins(dtype)
    plain = kind.loop(plain_model.parameters())
    optimizer = kind.make(model.parameters(), release_gradients=True, offload=offload(transfer, tile_numel))
    for step in range(3):
        micro = [10 * step + part for part in range(backwards)]
        plain.step(summed(increments(plain_model, micro, dtype)))
        for part in micro:
            loss_of(model, part, dtype).backward()
        optimizer.step()
        assert same_weights(plain_model, model), step


@pytest.mark.covering(2)
@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("transfer", ["direct", "simulated"])
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
@pytest.mark.parametrize("dtype", DTYPES)
@EVERY_KIND
def test_clipping_is_the_plain_loop_given_our_coefficient(
    kind: Kind, dtype: torch.dtype, max_norm: float, transfer: str, release: bool
) -> None:
    plain_model, model = twins(dtype)
    plain = kind.loop(plain_model.parameters())
    optimizer = kind.make(model.parameters(), release_gradients=release, offload=offload(transfer, 100))
    clipped = 0
    for step in range(3):
        gradients = increments(plain_model, [step], dtype)[0]
        loss_of(model, step, dtype).backward()
        norm = optimizer.clip_grad_norm_(max_norm)
        exact = sum(gradient.double().square().sum() for gradient in gradients).sqrt()
        torch.testing.assert_close(norm.double(), exact, rtol=1e-7, atol=0)
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0).item()
        clipped += coefficient < 1
        plain.step(gradients, scale=coefficient)
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(plain_model, model)
    assert clipped == (3 if max_norm < 1 else 0)


def test_torch_clip_grad_norm_works_untouched() -> None:
    plain_model, model = twins()
    plain = PlainLoop(plain_model.parameters(), **HYPER)
    optimizer = longshore.AdamW(model.parameters(), **HYPER, offload=simulated())
    for step in range(3):
        for each in (plain_model, model):
            loss_of(each, step).backward()
            assert torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1) > 0.1
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
    assert same_weights(plain_model, model)


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_groups_keep_their_own_hyper_parameters(kind: str, release: bool) -> None:
    plain_model, model = twins()

    def groups(of: nn.Sequential) -> list[dict[str, Any]]:
        return [
            {"params": list(of[0].parameters()), "lr": 1e-2, "weight_decay": 0.3},
            {"params": list(of[2].parameters()), "betas": (0.4, 0.5), "eps": 1e-3},
            {"params": list(of[3].parameters()), "lr": torch.tensor(2e-2), "maximize": True},
        ]

    plain = PlainLoop(groups(plain_model), getattr(torch.optim, kind), lr=5e-3, weight_decay=0.05)
    optimizer = getattr(longshore, kind)(
        groups(model), lr=5e-3, weight_decay=0.05, release_gradients=release, offload=simulated(tile_numel=1 << 20)
    )
    assert len(optimizer._core.members.store.tiles) == 1  # one tile holds all three groups
    for step in range(6):
        for group, ours in zip(plain.optimizer.param_groups, optimizer.param_groups, strict=True):
            group["lr"] = ours["lr"] = ours["lr"] * 0.9  # changed at any time
        loss_of(plain_model, step).backward()
        loss_of(model, step).backward()
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(plain_model, model), step


@pytest.mark.quick(0)
@EVERY_KIND
@pytest.mark.parametrize("release", [False, True])
def test_a_mixed_precision_model(release: bool, kind: Kind) -> None:
    def mixed() -> nn.Sequential:
        model = small_model()
        model[0].to(torch.bfloat16)
        model[2].to(torch.float32)
        model[3].to(torch.float16)
        return model

    def loss(model: nn.Sequential, step: int) -> Tensor:
        hidden = model[0](batch(step, torch.bfloat16)).float()
        return model[3](model[2](hidden).half()).float().pow(2).sum()

    plain_model, model = mixed(), mixed()
    plain = kind.loop(plain_model.parameters())
    optimizer = kind.make(model.parameters(), release_gradients=release, offload=simulated())
    for step in range(4):
        loss(plain_model, step).backward()
        loss(model, step).backward()
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(plain_model, model)


@pytest.mark.quick(0)
@pytest.mark.parametrize("dtype", DTYPES)
def test_offload_settings_change_no_bits(dtype: torch.dtype) -> None:
    weights = []
    for settings in (
        longshore.Offload(),
        longshore.Offload(tile_numel=3, threads=1),
        longshore.Offload(tile_numel=50, threads=5, cpu_set=[0]),
        longshore.Offload(tile_numel=50, device="none"),
        longshore.Offload(tile_numel=64, device="none", transfer=longshore.SimulatedTransfer()),
        simulated(seed=1, tile_numel=64),
        simulated(seed=2, tile_numel=333),
    ):
        for release in (False, True):
            model = small_model(dtype)
            optimizer = longshore.AdamW(model.parameters(), **HYPER, release_gradients=release, offload=settings)
            for step in range(3):
                loss_of(model, step, dtype).backward()
                optimizer.clip_grad_norm_(0.3)
                optimizer.step()
                optimizer.zero_grad()
            weights.append(nn.utils.parameters_to_vector(model.parameters()))
            if settings.transfer is not None and settings.device == "cpu":
                settings = simulated(seed=3, tile_numel=settings.tile_numel)
    assert all(torch.equal(weights[0], other) for other in weights[1:])


@EVERY_KIND
def test_nan_and_infinity_are_applied_as_torch_applies_them(kind: Kind) -> None:
    plain_model, model = twins()
    plain = kind.loop(plain_model.parameters())
    optimizer = kind.make(model.parameters())
    for each in (plain_model, model):
        loss_of(each, 0).backward()
        first = next(each.parameters()).grad
        first.view(-1)[:3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    plain.step_on_grads()
    optimizer.step()
    for ours, theirs in zip(model.parameters(), plain_model.parameters(), strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
    # Lion takes a step of the same size whatever the gradient's, unless it is NaN.
    assert (~next(model.parameters()).isfinite()).sum() == (1 if kind.name == "Lion" else 3)


def test_grad_scaler_works_untouched_in_default_mode() -> None:
    plain_model, model = twins()
    plain = PlainLoop(plain_model.parameters(), **HYPER)
    optimizer = longshore.AdamW(model.parameters(), **HYPER)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    skipped = 0
    for step in range(5):
        loss_of(plain_model, step).backward()
        scaler.scale(loss_of(model, step)).backward()
        if step == 2:
            next(model.parameters()).grad[0, 0] = float("inf")
            plain_model.zero_grad()
        else:
            plain.step_on_grads()
        before, scale = [parameter.clone() for parameter in model.parameters()], scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)):
            skipped += 1
            assert scaler.get_scale() < scale
        assert same_weights(plain_model, model)
    assert skipped == 1

"""``gradient_clipping`` of a DeepSpeed file."""

from __future__ import annotations

import math

import pytest
import torch
from support import PlainLoop, batch, loss_of, small_model

import longshore
from engine.files import OPTIONS, assert_same, file, gradients_of, norm_of, started, train, without


def coefficient_of(max_norm: float, norm: float) -> float:
    """torch's, as ``clip_grad_norm_`` computes it in float32."""
    return float(torch.clamp(max_norm / (torch.tensor(norm) + 1e-6), max=1.0))


@pytest.mark.parametrize("max_norm, clipped", [(0.05, 4), (240.0, 2), (1e6, 0)])
def test_coefficient(max_norm: float, clipped: int) -> None:
    """Always, sometimes, never: the plain loop given torch's coefficient of our norm; the norm is that of float64."""
    twin = small_model()
    loop = PlainLoop(twin.parameters(), **OPTIONS)
    found = 0
    with started(file(gradient_clipping=max_norm, gradient_accumulation_steps=2)) as engine:
        assert engine.get_global_grad_norm() is None
        for step in range(4):
            factor = 10.0 if step % 2 else 1.0
            train(engine, (loss_of(engine, 2 * step + micro) * factor for micro in range(2)))
            gradients = gradients_of(twin, [loss_of(twin, 2 * step + micro) * factor for micro in range(2)])
            norm = engine.get_global_grad_norm()
            assert norm == norm_of(gradients)
            coefficient = coefficient_of(max_norm, norm)
            found += coefficient < 1.0
            loop.step(gradients, coefficient)
            assert_same(engine.module, twin, step)
    assert found == clipped


def test_left_out_it_is_one_and_said_once() -> None:
    twin = small_model()
    loop = PlainLoop(twin.parameters(), **OPTIONS)
    with pytest.warns(UserWarning, match="gradient_clipping is not given, which means 1 in a DeepSpeed file") as said:
        engine = longshore.initialize(model=small_model(), config=without(file(), "gradient_clipping")).engine
    assert len(said) == 1
    for step in range(2):
        train(engine, [loss_of(engine, step)])
        gradients = gradients_of(twin, [loss_of(twin, step)])
        coefficient = coefficient_of(1.0, norm_of(gradients))
        assert coefficient < 1.0
        loop.step(gradients, coefficient)
        assert_same(engine.module, twin, step)
    engine.destroy()


def test_zero_is_none() -> None:
    twin = small_model()
    loop = PlainLoop(twin.parameters(), **OPTIONS)
    with started(file(gradient_clipping=0)) as engine:
        train(engine, [loss_of(engine, 0)])
        loop.step(gradients_of(twin, [loss_of(twin, 0)]))
        assert_same(engine.module, twin)
        assert engine.get_global_grad_norm() is None


@pytest.mark.parametrize("scale", [64.0, 100.0])
def test_the_loss_scale_is_divided_out_before_the_norm_is_taken(scale: float) -> None:
    """Unscaling and clipping are one factor where the scale is a power of two, and two factors otherwise."""
    twin, max_norm = small_model(torch.float16), 0.1
    loop = PlainLoop(twin.parameters(), **OPTIONS)
    with started(file(fp16={"enabled": True, "loss_scale": scale}, gradient_clipping=max_norm)) as engine:
        for step in range(3):
            train(engine, [loss_of(engine, step, torch.float16)])
            unscaled = [
                gradient * torch.tensor(1 / scale)
                for gradient in gradients_of(twin, [loss_of(twin, step, torch.float16)], scale)
            ]
            norm = engine.get_global_grad_norm()
            assert norm == pytest.approx(norm_of(unscaled), rel=1e-6)
            coefficient = coefficient_of(max_norm, norm)
            assert coefficient < 1.0
            loop.step(unscaled, coefficient)
            assert_same(engine.module, twin, step)


def test_what_is_not_finite_is_clipped_as_torch_clips_it() -> None:
    """Without a loss scale an infinite norm makes the coefficient 0, and infinity times 0 is NaN."""
    model = small_model()
    untouched = model[0].weight.detach().clone()
    with started(file(gradient_clipping=1.0, optimizer={"type": "SGD", "params": {"lr": 0.1}}), model) as engine:
        out = engine(batch(0))
        train(engine, [out.sum() + math.inf * model[3].bias[0]])
        assert engine.get_global_grad_norm() == math.inf
        assert engine.was_step_applied()
    assert model[3].bias.isnan().tolist() == [True] + [False] * 6
    assert torch.equal(model[0].weight, untouched)


def test_an_overflow_has_a_norm_too() -> None:
    with started(file(fp16={"enabled": True, "loss_scale": 16})) as engine:
        train(engine, [loss_of(engine, 0, torch.float16)])
        assert math.isfinite(engine.get_global_grad_norm())
        train(engine, [loss_of(engine, 1, torch.float16) * 1e9])
        assert not math.isfinite(engine.get_global_grad_norm())

"""The oracle against ``torch.optim.AdamW`` and ``Adam`` on the CPU, fused, bit for bit.

torch rounds the second moment differently in the last ``numel % 16`` elements
of a tensor (its scalar tail), so every tensor here has a multiple of 16.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from longshore.kernels import Scale
from longshore.kernels.reference import fma, rule_step
from longshore.optim.rules.adam import AdamRule
from tests.kernels.numbers import same_numbers

NUMEL = 4096


def gradient_of(step: int, numel: int = NUMEL) -> Tensor:
    """Sizes from 1e-6 to 1e2, so that moments and gradients differ in exponent."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(numel, generator=generator) * 10.0 ** torch.empty(numel).uniform_(-6, 2, generator=generator)


class Torch:
    """One parameter under torch's own optimizer."""

    def __init__(self, values: Tensor, *, decoupled: bool, **options: Any) -> None:
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        self.parameter = values.clone().requires_grad_()
        self.optimizer = kind([self.parameter], fused=True, **options)

    def step(self, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.parameter.grad = gradient.clone()
        self.optimizer.step()
        state = self.optimizer.state[self.parameter]
        return self.parameter.detach(), state["exp_avg"], state["exp_avg_sq"]

    def set_state(self, exp_avg: Tensor, exp_avg_sq: Tensor, step: int) -> None:
        self.optimizer.state[self.parameter] = {
            "step": torch.tensor(float(step)),
            "exp_avg": exp_avg.clone(),
            "exp_avg_sq": exp_avg_sq.clone(),
        }


def rule(step: int, **changes: Any) -> AdamRule:
    usual = AdamRule(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=step, decoupled=True)
    return replace(usual, **changes)


def check_steps(steps: int, lr: float | Tensor = 1e-3, **changes: Any) -> None:
    values = torch.randn(NUMEL)
    first = rule(1, lr=float(lr), **changes)
    plain = Torch(
        values,
        decoupled=first.decoupled,
        lr=lr,
        betas=(first.beta1, first.beta2),
        eps=first.eps,
        weight_decay=first.weight_decay,
        maximize=first.maximize,
    )
    state = (values, torch.zeros(NUMEL), torch.zeros(NUMEL))
    for step in range(1, steps + 1):
        state = rule_step(state, gradient_of(step), replace(first, step=step))
        for name, ours, torchs in zip("pmv", state, plain.step(gradient_of(step)), strict=True):
            assert torch.equal(ours, torchs), (name, step)
    assert (state[0] != values).float().mean() > 0.99  # they were stepped, all of them


@pytest.mark.covering(2)
@pytest.mark.parametrize("beta1", [0.0, 0.4, 0.5, 0.9])
@pytest.mark.parametrize("beta2", [0.0, 0.95, 0.999])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [True, False])
def test_twenty_steps_equal_torch(beta1: float, beta2: float, weight_decay: float, decoupled: bool) -> None:
    check_steps(20, beta1=beta1, beta2=beta2, weight_decay=weight_decay, decoupled=decoupled)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize(
    "changes", [{"maximize": True}, {"eps": 1e-3}, {"eps": 0.0}, {"lr": 10.0}, {"weight_decay": 1.0}]
)
def test_other_hyper_parameters_equal_torch(decoupled: bool, changes: dict[str, Any]) -> None:
    check_steps(5, decoupled=decoupled, **changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tensor_as_learning_rate_equals_torch(dtype: torch.dtype) -> None:
    check_steps(10, lr=torch.tensor(3e-4, dtype=dtype))


def test_hundreds_of_steps_equal_torch() -> None:
    check_steps(400)


@pytest.mark.slow
@pytest.mark.parametrize("decoupled", [True, pytest.param(False, marks=pytest.mark.full)])
def test_millions_of_elements_equal_torch(decoupled: bool) -> None:
    numel = 1 << 22
    values = torch.randn(numel)
    plain = Torch(values, decoupled=decoupled, lr=1e-3, weight_decay=0.01)
    state = (values, torch.zeros(numel), torch.zeros(numel))
    for step in range(1, 6):
        gradient = gradient_of(step, numel)
        state = rule_step(state, gradient, rule(step, decoupled=decoupled))
        for ours, torchs in zip(state, plain.step(gradient), strict=True):
            assert torch.equal(ours, torchs)


@pytest.mark.parametrize("step", [1, 2, 3, 10, 1000, 123457, 2**24 - 1, 2**24])
def test_any_step_count_equals_torch(step: int) -> None:
    values, exp_avg, exp_avg_sq = torch.randn(NUMEL), torch.randn(NUMEL), torch.rand(NUMEL)
    plain = Torch(values, decoupled=True, lr=1e-3, weight_decay=0.01)
    plain.set_state(exp_avg, exp_avg_sq, step - 1)
    ours = rule_step((values, exp_avg, exp_avg_sq), gradient_of(step), rule(step))
    for mine, torchs in zip(ours, plain.step(gradient_of(step)), strict=True):
        assert torch.equal(mine, torchs)


@pytest.mark.parametrize("decoupled", [True, False])
def test_denormals_equal_torch(decoupled: bool) -> None:
    small = 2.0**-130
    values, exp_avg, exp_avg_sq = (torch.randn(NUMEL) * small for _ in range(3))
    exp_avg_sq = exp_avg_sq.abs()
    gradient = torch.randn(NUMEL) * small
    plain = Torch(values, decoupled=decoupled, lr=1e-41, weight_decay=0.01, eps=1e-30)
    plain.set_state(exp_avg, exp_avg_sq, 2)
    ours = rule_step((values, exp_avg, exp_avg_sq), gradient, rule(3, lr=1e-41, eps=1e-30, decoupled=decoupled))
    for mine, torchs in zip(ours, plain.step(gradient), strict=True):
        assert torch.equal(mine, torchs)
        assert ((mine != 0) & (mine.abs() < torch.finfo(torch.float32).tiny)).float().mean() > 0.9


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_infinities_and_nan_go_where_torch_lets_them(decoupled: bool, beta1: float) -> None:
    gradient = gradient_of(1)
    specials = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 3e38, -3e38, 2.0**-149])
    gradient[:2048] = specials.repeat_interleave(256)
    values = torch.randn(NUMEL)
    values[:256] = specials.repeat(32)
    plain = Torch(values, decoupled=decoupled, lr=1e-3, betas=(beta1, 0.999), weight_decay=0.01)
    state = (values, torch.zeros(NUMEL), torch.zeros(NUMEL))
    for step in (1, 2):
        state = rule_step(state, gradient, rule(step, beta1=beta1, decoupled=decoupled))
        for ours, torchs in zip(state, plain.step(gradient), strict=True):
            assert same_numbers(ours, torchs)
            assert ours.isnan().any() or ours.isinf().any()
            assert ours.isfinite().any()


def test_scale_multiplies_one_factor_after_the_other() -> None:
    values, gradient = torch.randn(NUMEL), gradient_of(1)
    scale = Scale(0.7, 1 / 3)
    zeros = torch.zeros(NUMEL)
    twice = gradient * torch.tensor(0.7) * torch.tensor(1 / 3)
    scaled = rule_step((values, zeros, zeros), gradient, rule(1), scale)
    for ours, expected in zip(scaled, rule_step((values, zeros, zeros), twice, rule(1)), strict=True):
        assert torch.equal(ours, expected)
    assert not torch.equal(twice, gradient * torch.tensor(0.7 * (1 / 3)))  # one factor rounds differently


def nearest_float32(exact: Fraction) -> float:
    """Round to nearest even by the definition."""
    if exact == 0:
        return 0.0
    size, exponent = abs(exact), -149
    while size / Fraction(2) ** exponent >= 2**24:
        exponent += 1
    return float(round(size / Fraction(2) ** exponent) * Fraction(2) ** exponent) * (1 if exact > 0 else -1)


def test_fma_rounds_once() -> None:
    """Against rational arithmetic; half of the cases are ties of a sum rounded to double."""
    generator = torch.Generator().manual_seed(1)
    k = torch.randint(1, 64, (500,), generator=generator) * 2.0**-23
    sign = torch.randint(0, 2, (500,), generator=generator) * 2 - 1
    odd = torch.randint(0, 2**22, (500,), generator=generator) * 2 + 1
    a = torch.cat([(1 + k) * sign * 2.0**-12, torch.randn(500, generator=generator)])
    b = torch.cat([(1 - k) * 2.0**-12, torch.randn(500, generator=generator) * 2.0**-10])
    c = torch.cat([1 + odd * 2.0**-23, torch.randn(500, generator=generator)])
    exact = [Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in zip(*(t.tolist() for t in (a, b, c)), strict=True)]
    expected = torch.tensor([nearest_float32(x) for x in exact])
    assert torch.equal(fma(a, b, c), expected)
    assert ((a.double() * b.double() + c.double()).float() != expected).sum() > 400  # rounded twice
    assert (a * b + c != expected).sum() > 400  # not fused

"""The oracle of Adagrad and SGD against torch's fused optimizers on the CPU, bit for bit; Lion against its formula.

Every tensor has a multiple of 16 elements: see test_reference.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longshore.kernels import Scale
from longshore.kernels.reference import rule_output, rule_step
from longshore.optim.rules.adagrad import AdagradRule
from longshore.optim.rules.adam import AdamRule
from longshore.optim.rules.lion import LionRule
from longshore.optim.rules.muon import MomentumRule, UpdateRule
from longshore.optim.rules.sgd import SGDRule
from tests.kernels.numbers import awkward, same_numbers

NUMEL = 4096


def gradient_of(step: int) -> Tensor:
    """Sizes from 1e-6 to 1e2, so that states and gradients differ in exponent."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(NUMEL, generator=generator) * 10.0 ** torch.empty(NUMEL).uniform_(-6, 2, generator=generator)


class Torch:
    """One parameter under torch's own fused optimizer."""

    def __init__(self, kind: type[torch.optim.Optimizer], values: Tensor, **options: Any) -> None:
        self.parameter = values.clone().requires_grad_()
        self.optimizer = kind([self.parameter], fused=True, **options)  # pyright: ignore[reportCallIssue]

    def step(self, gradient: Tensor, state: str) -> tuple[Tensor, Tensor | None]:
        self.parameter.grad = gradient.clone()
        self.optimizer.step()
        return self.parameter.detach(), self.optimizer.state[self.parameter].get(state)


def check_adagrad(values: Tensor, gradients: list[Tensor], rule: AdagradRule, initial: float = 0.0) -> None:
    plain = Torch(
        torch.optim.Adagrad,
        values,
        lr=rule.lr,
        lr_decay=rule.lr_decay,
        eps=rule.eps,
        weight_decay=rule.weight_decay,
        initial_accumulator_value=initial,
        maximize=rule.maximize,
    )
    master, total = values, torch.full((NUMEL,), float(initial))
    for step, gradient in enumerate(gradients, start=1):
        master, total = rule_step((master, total), gradient, replace(rule, step=step))
        theirs, their_total = plain.step(gradient, "sum")
        assert their_total is not None
        assert same_numbers(master, theirs) and same_numbers(total, their_total), step
    assert (master != values).float().mean() > 0.9


@pytest.mark.covering(2)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("lr_decay", [0.0, 0.05])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("initial", [0.0, 0.1])
def test_adagrad_equals_torch(weight_decay: float, lr_decay: float, maximize: bool, initial: float) -> None:
    rule = AdagradRule(lr=1e-2, lr_decay=lr_decay, eps=1e-10, weight_decay=weight_decay, step=0, maximize=maximize)
    check_adagrad(torch.randn(NUMEL), [gradient_of(step) for step in range(15)], rule, initial)


def check_sgd(values: Tensor, gradients: list[Tensor], rule: SGDRule) -> None:
    plain = Torch(
        torch.optim.SGD,
        values,
        lr=rule.lr,
        momentum=rule.momentum,
        dampening=rule.dampening,
        weight_decay=rule.weight_decay,
        nesterov=rule.nesterov,
        maximize=rule.maximize,
    )
    arrays = (values,) if rule.momentum == 0 else (values, torch.full_like(values, torch.nan))
    for step, gradient in enumerate(gradients, start=1):
        arrays = rule_step(arrays, gradient, replace(rule, first=step == 1))
        theirs, their_buffer = plain.step(gradient, "momentum_buffer")
        assert same_numbers(arrays[0], theirs), step
        assert (their_buffer is None) == (len(arrays) == 1)
        if their_buffer is not None:
            assert same_numbers(arrays[1], their_buffer), step
    master = arrays[0]
    assert (master != values).float().mean() > 0.9


MOMENTA = [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.3, False), (0.5, 1.0, False), (0.9, 0.0, True)]


@pytest.mark.covering(2)
@pytest.mark.parametrize(("momentum", "dampening", "nesterov"), MOMENTA)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("maximize", [False, True])
def test_sgd_equals_torch(
    momentum: float, dampening: float, nesterov: bool, weight_decay: float, maximize: bool
) -> None:
    rule = SGDRule(1e-2, momentum, dampening, weight_decay, nesterov, first=True, maximize=maximize)
    check_sgd(torch.randn(NUMEL), [gradient_of(step) for step in range(15)], rule)


def test_what_is_not_finite_goes_where_torch_lets_it() -> None:
    values, gradients = awkward(NUMEL, 1), [awkward(NUMEL, seed) for seed in (2, 3, 4)]
    check_adagrad(values, gradients, AdagradRule(1e-2, 0.0, 1e-10, 0.1, step=0))
    check_sgd(values, gradients, SGDRule(1e-2, 0.9, 0.0, 0.1, nesterov=True, first=True))


def test_denormals_equal_torch() -> None:
    small = 2.0**-130
    values, gradients = torch.randn(NUMEL) * small, [torch.randn(NUMEL) * small for _ in range(3)]
    check_adagrad(values, gradients, AdagradRule(1e-2, 0.0, 1e-2, 0.1, step=0))
    check_sgd(values, gradients, SGDRule(0.1, 0.9, 0.0, 0.1, nesterov=True, first=True))


@pytest.mark.covering(2)
@pytest.mark.parametrize("beta1", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("maximize", [False, True])
def test_lion_is_the_formula_of_the_paper(beta1: float, weight_decay: float, maximize: bool) -> None:
    """In double, where a coordinate whose sign float32 could see otherwise is not compared."""
    rule = LionRule(1e-2, beta1, 0.99, weight_decay, maximize=maximize)
    master, moment = torch.randn(NUMEL), torch.zeros(NUMEL)
    exact, exact_moment = master.double(), moment.double()
    clear = torch.ones(NUMEL, dtype=torch.bool)
    for step in range(15):
        gradient = gradient_of(step)
        g = gradient.double() * (-1 if maximize else 1)
        update = beta1 * exact_moment + (1 - beta1) * g
        clear &= update.abs() > 1e-5 * (beta1 * exact_moment.abs() + (1 - beta1) * g.abs())
        exact = exact * (1 - rule.lr * weight_decay) - rule.lr * update.sign()
        exact_moment = 0.99 * exact_moment + 0.01 * g
        master, moment = rule_step((master, moment), gradient, rule)
    assert clear.float().mean() > 0.9
    torch.testing.assert_close(master[clear].double(), exact[clear], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(moment.double(), exact_moment, rtol=1e-4, atol=1e-6)


def test_the_sign_of_nothing_and_of_nan() -> None:
    master, moment = torch.tensor([1.0, -0.0, 2.0, 3.0, 4.0]), torch.zeros(5)
    gradient = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf")])
    stepped, _ = rule_step((master, moment), gradient, LionRule(0.5, 0.9, 0.99, 0.0))
    assert same_numbers(stepped, torch.tensor([1.0, -0.0, float("nan"), 2.5, 4.5]))


def test_every_rule_scales_one_factor_after_the_other() -> None:
    values, state, gradient, scale = torch.randn(NUMEL), torch.rand(NUMEL), gradient_of(1), Scale(0.7, 1 / 3)
    twice = gradient * torch.tensor(0.7) * torch.tensor(1 / 3)
    lion, adagrad = LionRule(1e-2, 0.9, 0.99, 0.1), AdagradRule(1e-2, 0.0, 1e-10, 0.1, step=3)
    sgd = SGDRule(1e-2, 0.9, 0.0, 0.1, nesterov=True, first=False)
    pairs = [
        (rule_step((values, state), gradient, lion, scale), rule_step((values, state), twice, lion)),
        (rule_step((values, state), gradient, adagrad, scale), rule_step((values, state), twice, adagrad)),
        (rule_step((values, state), gradient, sgd, scale), rule_step((values, state), twice, sgd)),
    ]
    for scaled, expected in pairs:
        for ours, theirs in zip(scaled, expected, strict=True):
            assert torch.equal(ours, theirs)
    assert not torch.equal(twice, gradient)


@pytest.mark.parametrize(("decoupled", "step"), list(itertools.product([True, False], [1, 2, 1000])))
def test_without_bias_correction_the_moments_count_as_they_are(decoupled: bool, step: int) -> None:
    """At the step counts of a finished warm-up both corrections are 1 to the last bit of a float."""
    rule = AdamRule(1e-3, 0.9, 0.99, 1e-8, 0.1, decoupled, step=step, bias_correction=False)
    buffer = torch.randn(3, NUMEL)
    buffer[2].abs_()
    late = replace(rule, step=10**5, bias_correction=True)
    for ours, expected in zip(
        rule_step(buffer, gradient_of(1), rule),
        rule_step(buffer, gradient_of(1), late),
        strict=True,
    ):
        assert torch.equal(ours, expected)
    early = rule_step(buffer, gradient_of(1), replace(rule, bias_correction=True))
    assert step == 1000 or not torch.equal(early[0], rule_step(buffer, gradient_of(1), rule)[0])


@pytest.mark.covering(2)
@pytest.mark.parametrize("momentum", [0.0, 0.4, 0.5, 0.6, 0.95, 1.0])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("numel", [NUMEL, 17])
def test_the_elementwise_parts_of_muon_are_torchs(momentum: float, nesterov: bool, numel: int) -> None:
    buffer, gradient, orthogonal = torch.zeros(numel), gradient_of(1)[:numel], torch.randn(numel).bfloat16()
    theirs = buffer.clone()
    for step in range(1, 4):
        gradient = gradient_of(step)[:numel]
        rule = MomentumRule(momentum, nesterov)
        update = rule_output((buffer,), gradient, rule)
        (buffer,) = rule_step((buffer,), gradient, rule)
        theirs.lerp_(gradient, 1 - momentum)
        assert same_numbers(buffer, theirs)
        assert same_numbers(update, gradient.lerp(theirs, momentum) if nesterov else theirs)
    master = gradient_of(9)[:numel]
    (ours,) = rule_step((master,), orthogonal, UpdateRule(lr=2e-2, decay=1 - 2e-2 * 0.1))
    assert same_numbers(ours, master.clone().mul_(1 - 2e-2 * 0.1).add_(orthogonal, alpha=-2e-2))

"""The arithmetic of a step in plain torch: the oracle of every native kernel.

Slow and simple on purpose. Each line is one float32 operation that rounds to
nearest even, except :func:`fma`, which rounds once. The same numbers come out
of the native kernels on every instruction set, and out of
``torch.optim.AdamW(fused=True)`` on the CPU.

The update is that of Kingma and Ba, "Adam: A Method for Stochastic
Optimization" (2015), algorithm 1, with the decay of Loshchilov and Hutter,
"Decoupled Weight Decay Regularization" (2019), algorithm 2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from longshore.kernels.rules import UNSCALED, AdagradRule, AdamRule, LionRule, Rule, Scale, SGDRule


class AdamScalars(NamedTuple):
    """What the element-wise pass reads, computed in double and rounded once."""

    decay: float
    l2: float
    lerp_weight: float
    beta2: float
    one_minus_beta2: float
    root_bias_correction2: float
    eps: float
    negative_step_size: float


def scalars_of(rule: AdamRule) -> AdamScalars:
    """The scalars of one call, in double; :func:`adam_step` rounds each to float32."""
    bias_correction1 = 1.0 - rule.beta1**rule.step if rule.bias_correction else 1.0
    bias_correction2 = 1.0 - rule.beta2**rule.step if rule.bias_correction else 1.0
    return AdamScalars(
        decay=1.0 - rule.lr * rule.weight_decay if rule.decoupled else 1.0,
        l2=0.0 if rule.decoupled else rule.weight_decay,
        lerp_weight=1.0 - rule.beta1,
        beta2=rule.beta2,
        one_minus_beta2=1.0 - rule.beta2,
        root_bias_correction2=math.sqrt(bias_correction2),
        eps=rule.eps,
        negative_step_size=-(rule.lr / bias_correction1),
    )


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` rounded once, for float32 tensors (broadcast as torch does).

    The product of two float32 numbers is exact in float64. The sum is rounded
    to odd there (Boldo and Melquiond, IEEE Trans. Computers 57(4), 2008), after
    which rounding to float32 is correct.
    """
    product = a.double() * b.double()
    addend = c.double()
    total = product + addend
    addend_part = total - product
    error = (product - (total - addend_part)) + (addend - addend_part)
    bits = total.view(torch.int64)
    sticky = ((error > 0) | (error < 0)) & (bits & 1 == 0)
    away = (error > 0) == (total > 0)
    bits = bits + torch.where(sticky, torch.where(away, 1, -1), 0)
    return bits.view(torch.float64).float()


def _float32(*values: float) -> list[Tensor]:
    return [torch.tensor(value, dtype=torch.float64).float() for value in values]


def _scaled(gradient: Tensor, scale: Scale, maximize: bool) -> Tensor:
    first, second = _float32(-scale.first if maximize else scale.first, scale.second)
    return gradient.float() * first * second


def _root(values: Tensor) -> Tensor:
    # torch's float32 sqrt is not correctly rounded everywhere (seen with 2.13 on
    # AVX-512). A root in double is far enough from any tie to round like the exact one.
    return values.double().sqrt().float()


def adam_step(
    master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, gradient: Tensor, rule: AdamRule, scale: Scale = UNSCALED
) -> tuple[Tensor, Tensor, Tensor]:
    """One Adam or AdamW step; nothing is changed in place.

    The update is that of Kingma and Ba, "Adam: A Method for Stochastic
    Optimization" (2015), algorithm 1, with the decay of Loshchilov and Hutter,
    "Decoupled Weight Decay Regularization" (2019), algorithm 2.

    Args:
        master: float32 weights, any shape.
        exp_avg: float32 first moment, same shape.
        exp_avg_sq: float32 second moment, same shape.
        gradient: same shape; float32, bfloat16 or float16.
        rule: hyper-parameters, and the step count after this step.
        scale: what the gradient is multiplied by, one factor after the other.

    Returns:
        The new master, first moment and second moment. The published parameter
        is ``master.to(dtype)``, which rounds to nearest even.
    """
    scalars = scalars_of(rule)
    decay, l2, lerp_weight, beta2, one_minus_beta2, root_bias_correction2, eps, negative_step_size = _float32(*scalars)
    g = _scaled(gradient, scale, rule.maximize)
    p = master
    if scalars.l2 != 0:
        g = fma(p, l2, g)
    else:
        p = p * decay
    if lerp_weight < 0.5:
        m = fma(lerp_weight, g - exp_avg, exp_avg)
    else:
        m = fma(lerp_weight - 1, g - exp_avg, g)
    v = fma(one_minus_beta2 * g, g, exp_avg_sq * beta2)
    denominator = _root(v) / root_bias_correction2 + eps
    p = p + (negative_step_size * m) / denominator
    return p, m, v


def lion_step(
    master: Tensor, exp_avg: Tensor, gradient: Tensor, rule: LionRule, scale: Scale = UNSCALED
) -> tuple[Tensor, Tensor]:
    """One Lion step: the new master and moment; tensors as in :func:`adam_step`.

    Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023),
    algorithm 2. The sign of zero, of either sign, is 0, and that of NaN is NaN.
    """
    decay, negative_lr = _float32(1.0 - rule.lr * rule.weight_decay, -rule.lr)
    beta1, one_minus_beta1 = _float32(rule.beta1, 1.0 - rule.beta1)
    beta2, one_minus_beta2 = _float32(rule.beta2, 1.0 - rule.beta2)
    g = _scaled(gradient, scale, rule.maximize)
    c = fma(one_minus_beta1, g, exp_avg * beta1)
    sign = torch.where(c.isnan(), c, (c > 0).float() - (c < 0).float())
    p = master * decay + negative_lr * sign
    m = fma(one_minus_beta2, g, exp_avg * beta2)
    return p, m


def adagrad_step(
    master: Tensor, total: Tensor, gradient: Tensor, rule: AdagradRule, scale: Scale = UNSCALED
) -> tuple[Tensor, Tensor]:
    """One Adagrad step: the new master and sum of squares; tensors as in :func:`adam_step`.

    Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning
    and Stochastic Optimization" (2011), with torch's decay of the learning rate.
    """
    l2, eps = _float32(rule.weight_decay, rule.eps)
    (negative_step_size,) = _float32(-(rule.lr / (1.0 + (rule.step - 1.0) * rule.lr_decay)))
    g = _scaled(gradient, scale, rule.maximize)
    if l2 != 0:
        g = fma(master, l2, g)
    total = fma(g, g, total)
    denominator = _root(total) + eps
    p = master + (negative_step_size * g) / denominator
    return p, total


def sgd_step(
    master: Tensor, buffer: Tensor | None, gradient: Tensor, rule: SGDRule, scale: Scale = UNSCALED
) -> tuple[Tensor, Tensor | None]:
    """One step of SGD: the new master and momentum buffer; tensors as in :func:`adam_step`.

    Without momentum the buffer is returned as it is. Momentum and Nesterov's
    are those of Sutskever et al., "On the importance of initialization and
    momentum in deep learning" (2013), in torch's form, in which the learning
    rate is no part of the buffer.
    """
    l2, momentum, negative_lr = _float32(rule.weight_decay, rule.momentum, -rule.lr)
    (one_minus_dampening,) = _float32(1.0 - rule.dampening)
    g = _scaled(gradient, scale, rule.maximize)
    if l2 != 0:
        g = fma(master, l2, g)
    if rule.momentum != 0:
        if rule.first:
            buffer = g
        else:
            assert buffer is not None
            buffer = fma(one_minus_dampening, g, buffer * momentum)
        g = fma(buffer, momentum, g) if rule.nesterov else buffer
    p = fma(g, negative_lr, master)
    return p, buffer


def rule_step(page: Tensor, gradient: Tensor, rule: Rule, scale: Scale = UNSCALED) -> Tensor:
    """One step of a whole page, float32 ``[page_arrays, page_numel]``, by a rule of any kind; a new page."""
    if isinstance(rule, AdamRule):
        return torch.stack(adam_step(page[0], page[1], page[2], gradient, rule, scale))
    if isinstance(rule, LionRule):
        return torch.stack(lion_step(page[0], page[1], gradient, rule, scale))
    if isinstance(rule, AdagradRule):
        return torch.stack(adagrad_step(page[0], page[1], gradient, rule, scale))
    master, buffer = sgd_step(page[0], page[1] if len(page) == 2 else None, gradient, rule, scale)
    return master[None] if len(page) == 1 or buffer is None else torch.stack([master, buffer])

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

from longshore.kernels.rules import UNSCALED, AdamRule, Scale


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
    bias_correction1 = 1.0 - rule.beta1**rule.step
    bias_correction2 = 1.0 - rule.beta2**rule.step
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


def adam_step(
    master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, gradient: Tensor, rule: AdamRule, scale: Scale = UNSCALED
) -> tuple[Tensor, Tensor, Tensor]:
    """One Adam or AdamW step; nothing is changed in place.

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
    one = [torch.tensor(value, dtype=torch.float64).float() for value in scalars]
    decay, l2, lerp_weight, beta2, one_minus_beta2, root_bias_correction2, eps, negative_step_size = one
    g = gradient.float() * torch.tensor(-scale.first if rule.maximize else scale.first, dtype=torch.float32)
    g = g * torch.tensor(scale.second, dtype=torch.float32)
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
    # torch's float32 sqrt is not correctly rounded everywhere (seen with 2.13 on
    # AVX-512). A root in double is far enough from any tie to round like the exact one.
    denominator = v.double().sqrt().float() / root_bias_correction2 + eps
    p = p + (negative_step_size * m) / denominator
    return p, m, v

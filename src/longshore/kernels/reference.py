"""The operations that rules are written in, in plain torch, and a step by any rule: the oracle of every kernel.

Slow and simple on purpose. Each operation works on float32 and rounds once, to nearest even. The arithmetic of each
rule is ``update`` in its file in :mod:`longshore.optim.rules`. The native kernels on every instruction set, the Triton
kernels, and ``torch.optim.AdamW(fused=True)`` (``Adam``, ``Adagrad``, ``SGD``) on the CPU compute the same bits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from longshore.kernels.base import UNSCALED, Rule, Scale

Operand = Tensor | float
Scalars = Sequence[Tensor]


def scalar(scalars: Scalars, index: int) -> Tensor:
    """One of the scalars of a rule, float32."""
    return scalars[index]


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` rounded once, for float32 tensors (broadcast as torch does).

    The product of two float32 numbers is exact in float64. The sum is rounded to odd there (Boldo and Melquiond, IEEE
    Trans. Computers 57(4), 2008), after which rounding to float32 is correct.
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


def divide(a: Tensor, b: Tensor) -> Tensor:
    """``a / b``. Written out, because a plain ``/`` is an approximation in Triton."""
    return a / b


def root(values: Tensor) -> Tensor:
    """The square root.

    torch's float32 sqrt is not correctly rounded everywhere (seen with 2.13 on AVX-512). A root in double is far
    enough from any tie to round like the exact one.
    """
    return values.double().sqrt().float()


def where(condition: Tensor, yes: Operand, no: Operand) -> Tensor:
    """``yes`` where the condition holds, ``no`` elsewhere."""
    return torch.where(condition, *(x if isinstance(x, Tensor) else _float32(x) for x in (yes, no)))


def rule_step(
    arrays: Sequence[Tensor] | Tensor, gradient: Tensor, rule: Rule, scale: Scale = UNSCALED
) -> tuple[Tensor, ...]:
    """One step by any rule; nothing is changed in place.

    Args:
        arrays: float32 master and states, or a buffer of them. States that a rule can do without may be left out.
        gradient: of the same shape as each array; float32, bfloat16 or float16.
        rule: hyper-parameters, and the step count after this step.
        scale: what the gradient is multiplied by, one factor after the other.

    Returns:
        The new arrays, as many as were given. The published parameter is ``master.to(dtype)``, rounded to nearest even.

    Raises:
        ValueError: a number of arrays that the rule does not have, or a step count below 1.
    """
    most = 1 + len(rule.states)
    if not most - rule.optional_states <= len(arrays) <= most:
        raise ValueError(f"{len(arrays)} arrays, and {rule.name} has {most}, {rule.optional_states} of them optional")
    if getattr(rule, "step", 1) < 1:
        raise ValueError("a step count below 1")
    first, second = _float32(-scale.first if rule.maximize else scale.first), _float32(scale.second)
    scalars = [_float32(value) for value in rule.scalars]
    g = gradient.float() * first * second
    absent = [g] * (most - len(arrays))
    return type(rule).update(scalars, g, *arrays, *absent)[: len(arrays)]


def _float32(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64).float()


def float32_bytes(value: float) -> bytes:
    """Round a double to the nearest float32, whatever float mode this thread is in.

    After ``torch.set_flush_denormal(True)`` the processor would make a denormal (a tiny eps, say) zero.
    """
    if 0.0 < abs(value) < 2.0**-126:
        units = round(abs(value) * 2.0**149)  # of the smallest float32: exact, then half to even
        return struct.pack("I", units | (0x80000000 if value < 0 else 0))
    try:
        return struct.pack("f", value)
    except OverflowError:  # beyond the largest float32, which struct refuses
        return struct.pack("f", math.copysign(math.inf, value))

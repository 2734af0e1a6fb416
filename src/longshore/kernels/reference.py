"""Operations that rules are written with, in plain torch, and a step by any rule: the oracle of every kernel.

This code is slow and simple on purpose. Each operation works on float32 and rounds once, to nearest even. The
arithmetic of each rule is ``update`` in its file in :mod:`longshore.optim.rules`. The native kernels on every
instruction set, the Triton kernels, and ``torch.optim.AdamW(fused=True)`` (``Adam``, ``Adagrad``, ``SGD``) on the CPU
compute the same bits.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from longshore.kernels.base import UNSCALED, Rule, Scale
from longshore.kernels.buffers import EncodedBuffer, random_bits, rounding_key
from longshore.layout.formats import NEVER_NEGATIVE, Coding

CHECKSUM_FACTOR = 0x1E3779B97F4A7C15
"""Odd factor of :func:`checksum`, also in triton_rules.py."""
_CHECKSUM_NUMEL = 1 << 20
_SUM_NUMEL = 1 << 22
"""Elements that are squared at a time, which takes 12 bytes for each."""

Operand = Tensor | float
Scalars = Sequence[Tensor]


def scalar(scalars: Scalars, index: int) -> Tensor:
    """Return one of the scalars of a rule, as float32."""
    return scalars[index]


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return ``a * b + c`` rounded once, for float32 tensors (broadcast as in torch).

    The product of two float32 numbers is exact in float64. The float64 sum is rounded to odd (Boldo and Melquiond, IEEE
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
    """Return ``a / b``. Rules call this function because a plain ``/`` is an approximation in Triton."""
    return a / b


def root(values: Tensor) -> Tensor:
    """Return the square root.

    torch's float32 sqrt is not correctly rounded everywhere (seen with 2.13 on AVX-512). A float64 root is so far from
    any tie that it rounds to float32 like the exact root.
    """
    return values.double().sqrt().float()


def where(condition: Tensor, yes: Operand, no: Operand) -> Tensor:
    """Return ``yes`` where the condition holds, and ``no`` elsewhere."""
    return torch.where(condition, *(x if isinstance(x, Tensor) else _float32(x) for x in (yes, no)))


def canonical(values: Tensor) -> Tensor:
    """Return the values with one NaN for all: the quiet one with a positive sign and no other bit of its payload. The
    NaN that arithmetic makes is the processor's."""
    return values.masked_fill(values.isnan(), math.nan)


def adopted(master: Tensor, parameter: Tensor) -> Tensor:
    """Return the float32 master, with every element of ``parameter`` whose bits differ from the rounded master in the
    place of its master: it was written by others."""
    integer = {2: torch.int16, 4: torch.int32}[parameter.element_size()]
    differs = master.to(parameter.dtype).view(integer) != parameter.view(integer)
    return torch.where(differs, parameter.float(), master)


def checksum(values: Tensor) -> Tensor:
    """Return a checksum of the bits of a flat tensor and of their places: int64, 0-dim, on the tensor's device.

    It is a sum, modulo 2**64, over all elements: the place in the upper 32 bits and the element's own bits in the lower
    ones, multiplied by an odd number, with the upper half then added to the lower one by exclusive or. So a tensor that
    differs in one element never has the same checksum, and another one hardly ever.
    """
    integer, mask = {2: (torch.int16, 0xFFFF), 4: (torch.int32, 0xFFFFFFFF)}[values.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for begin in range(0, values.numel(), _CHECKSUM_NUMEL):
        part = values[begin : begin + _CHECKSUM_NUMEL].view(integer)
        places = torch.arange(begin, begin + part.numel(), dtype=torch.int64, device=values.device)
        mixed = ((places << 32) | (part.long() & mask)) * CHECKSUM_FACTOR
        total += (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)).sum()
    return total


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Return the :func:`checksum` of each flat tensor, all on one device."""
    return torch.stack([checksum(values) for values in tensors])


def sums_of_squares(parameters: Sequence[Sequence[Tensor]], scale: Scale = UNSCALED) -> list[list[float]]:
    """Return sums of squares of parts of each parameter, whose ranges are flat and on one device: in float64, of
    elements that are multiplied by the factors in float32. The host waits once."""
    sums, counts = [], []
    for ranges in parameters:
        before = len(sums)
        for part in (part for values in ranges for part in values.split(_SUM_NUMEL)):
            sums.append(_sum_of_squares(part, scale))
        counts.append(len(sums) - before)
    found = iter(torch.stack(sums).tolist() if sums else ())
    return [list(itertools.islice(found, count)) for count in counts]


def _sum_of_squares(values: Tensor, scale: Scale) -> Tensor:
    scaled = (values.float() * scale.first * scale.second).double()
    return torch.dot(scaled, scaled)


def rule_step(
    arrays: Sequence[Tensor] | Tensor,
    gradient: Tensor,
    rule: Rule,
    scale: Scale = UNSCALED,
    parameter: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return the arrays after one step by any rule; the arguments are not changed.

    Args:
        arrays: float32 master and states, or a buffer of them. Optional states may be left out.
        gradient: of the same shape as each array; float32, bfloat16 or float16.
        rule: hyper-parameters, and the step count after this step.
        scale: factors by which the gradient is multiplied, one after the other.
        parameter: as it is before the step, to be :func:`adopted` first; None: it has no writes of others.

    Returns:
        The new arrays, as many as were given. The published parameter is :func:`rule_output`, rounded to nearest even.

    Raises:
        ValueError: the number of arrays is not one that the rule has, or the step count is below 1.
    """
    return _updated(arrays, gradient, rule, scale, parameter)[: len(arrays)]


def rule_output(
    arrays: Sequence[Tensor] | Tensor,
    gradient: Tensor,
    rule: Rule,
    scale: Scale = UNSCALED,
    parameter: Tensor | None = None,
) -> Tensor:
    """Return the values that a step, with the arguments and errors of :func:`rule_step`, rounds to the dtype of its
    outputs: the new master, in general."""
    return _updated(arrays, gradient, rule, scale, parameter)[-1 if rule.outputs_last else 0]


def encoded_step(
    buffer: EncodedBuffer,
    gradient: Tensor,
    rule: Rule,
    coding: Coding,
    scale: Scale = UNSCALED,
    parameter: Tensor | None = None,
) -> tuple[EncodedBuffer, Tensor]:
    """Return the buffer after one step by any rule, and the new master; the arguments are those of :func:`rule_step`.

    The states are decoded, and the new ones encoded with the random bits of ``coding``, after the new master was
    computed from them in float32. A float32 ``parameter`` is the master of a buffer without one.
    """
    numel = gradient.numel()
    names = rule.states[: buffer.shape[0] - (not buffer.own_master)]
    everything = slice(0, numel)
    states = [buffer.decoded(state, everything, name in NEVER_NEGATIVE) for state, name in enumerate(names)]
    old = parameter if buffer.own_master and parameter is not None else buffer.master
    compared = None if buffer.own_master else parameter
    master, *after = rule_step([old, *states], gradient, rule, scale, compared)
    stepped = EncodedBuffer(buffer.block.clone(), buffer.format, buffer.own_master, *buffer.shape)
    if not buffer.own_master:
        stepped.master.copy_(master)
    random = random_bits(rounding_key(coding.stream, rule.step), coding.place, numel)
    for state, (name, values) in enumerate(zip(names, after, strict=True)):
        bits = random & 0xFFFF if state == 0 else random >> 16
        stepped.encode(state, everything, name in NEVER_NEGATIVE, values, bits)
    return stepped, master


def _updated(
    arrays: Sequence[Tensor] | Tensor, gradient: Tensor, rule: Rule, scale: Scale, parameter: Tensor | None
) -> tuple[Tensor, ...]:
    most = 1 + len(rule.states)
    if not most - rule.optional_states <= len(arrays) <= most:
        raise ValueError(f"{len(arrays)} arrays, and {rule.name} has {most}, {rule.optional_states} of them optional")
    if rule.step < 1:
        raise ValueError("a step count below 1")
    first, second = _float32(-scale.first if rule.maximize else scale.first), _float32(scale.second)
    scalars = [_float32(value) for value in rule.scalars]
    g = gradient.float() * first * second
    absent = [g] * (most - len(arrays))
    master = arrays[0] if parameter is None else adopted(arrays[0], parameter)
    return tuple(map(canonical, type(rule).update(scalars, g, master, *arrays[1:], *absent)))


def _float32(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64).float()


def float32_bytes(value: float) -> bytes:
    """Return the bytes of the float32 nearest to ``value``, whatever the float mode of this thread is.

    After ``torch.set_flush_denormal(True)``, the processor would replace a denormal, such as a tiny eps, by zero.
    """
    if 0.0 < abs(value) < 2.0**-126:
        units = round(abs(value) * 2.0**149)  # multiples of the smallest float32: the product is exact, ties go to even
        return struct.pack("I", units | (0x80000000 if value < 0 else 0))
    try:
        return struct.pack("f", value)
    except OverflowError:  # struct refuses numbers beyond the largest float32
        return struct.pack("f", math.copysign(math.inf, value))

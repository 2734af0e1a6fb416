"""Formats of the states in a buffer: float32, bfloat16, or 8 bits; docs/states.md states their bits.

A step decodes the states, computes in float32, and encodes the results. Encoding rounds stochastically: a number
between two codes becomes one or the other, with probabilities such that its expected value is itself. Rounding to
nearest would leave a second moment where it is, as one step with ``beta2=0.999`` changes it by less than half a unit in
the last place. The random bits depend on the seed, the parameter's name, the element's place in the whole parameter and
the step count alone, so neither tiles, threads, ranks nor resuming change them.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from longshore.layout.formats import BLOCK_NUMEL

# -- random bits ---------------------------------------------------------------


_MASK = 0xFFFFFFFF
_STEP_FACTOR = 0x9E3779B97F4A7C15
PLACE_FACTOR = 0x9E3779B9
"""Factor of the upper half of an element's place."""
MIX_FACTORS = 0x21F0AAAD, 0x735A2D97
"""Factors of the hash in :func:`random_bits`, which is one of those that C. Wellons' "Hash Prospector" (2018) measures:
for numbers that count up, each bit of the result is as good as random."""


def rounding_key(stream: int, step: int) -> int:
    """Return the key, of 64 bits, of a parameter's step: splitmix64 (Steele, Lea and Flood, "Fast Splittable
    Pseudorandom Number Generators", 2014) of the stream, ``step`` numbers further."""
    x = (stream + step * _STEP_FACTOR) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


def random_bits(key: int, place: int, numel: int) -> Tensor:
    """Return 32 random bits for each of ``numel`` elements from ``place`` on: int64 ``[numel]``, on the CPU. The lower
    16 are for a parameter's first state, the upper ones for the second."""
    places = torch.arange(place, place + numel, dtype=torch.int64, device="cpu")
    x = (places & _MASK) ^ (key & _MASK)
    x = x ^ (x >> 16)
    x = (x * MIX_FACTORS[0]) & _MASK
    x = x ^ (((key >> 32) + (places >> 32) * PLACE_FACTOR) & _MASK)
    x = x ^ (x >> 15)
    x = (x * MIX_FACTORS[1]) & _MASK
    return x ^ (x >> 15)


# -- bfloat16 ------------------------------------------------------------------

_INFINITY = 0x7F800000
_LARGEST_SCALE = 0x7F000000  # 2**127


def encode_bfloat16(values: Tensor, random: Tensor | None) -> Tensor:
    """Round float32 to bfloat16: int16, its bits.

    Args:
        values: float32, on the CPU.
        random: 16 bits for each element; None: round to nearest even.

    Finite values stay finite, infinity stays, and every NaN becomes the same one.
    """
    bits = values.view(torch.int32).long() & _MASK
    magnitude = bits & 0x7FFFFFFF
    added = 0x7FFF + ((magnitude >> 16) & 1) if random is None else random
    rounded = ((magnitude + added) >> 16).clamp(max=0x7F7F)
    signed = torch.where(magnitude == _INFINITY, 0x7F80, rounded) | ((bits >> 16) & 0x8000)
    return torch.where(magnitude > _INFINITY, 0x7FC0, signed).to(torch.int16)


def decode_bfloat16(encoded: Tensor) -> Tensor:
    """Return the float32 values of int16 bits."""
    return encoded.view(torch.bfloat16).float()


# -- 8 bits --------------------------------------------------------------------


class ByteCode(NamedTuple):
    """One of the two codes of 8 bits.

    A code is a sign, if it has one, and a number from 0 on: 0 is zero; the largest two are infinity and NaN; those
    between are ``2**octave * (1 + mantissa / 2**mantissa_bits)``, in order, and the largest is twice the block's
    scale.
    """

    signed: bool
    mantissa_bits: int

    @property
    def nan(self) -> int:
        return 127 if self.signed else 255

    @property
    def infinity(self) -> int:
        return self.nan - 1

    @property
    def largest(self) -> int:
        """Code of the largest finite number."""
        return self.nan - 2

    @property
    def dropped_bits(self) -> int:
        """Bits of a float32 mantissa that a code does not have."""
        return 23 - self.mantissa_bits

    @property
    def one(self) -> int:
        """The code of the block's scale itself."""
        return self.largest - (1 << self.mantissa_bits)


SIGNED = ByteCode(True, 3)
UNSIGNED = ByteCode(False, 3)
LEAST_EXPONENT = 33
"""Exponent, as float32 has it, of the smallest scale: the smallest code is then still a normal float32."""


def encode_bytes(values: Tensor, code: ByteCode, random: Tensor | None) -> tuple[Tensor, Tensor]:
    """Encode float32 in blocks of :data:`BLOCK_NUMEL`.

    Args:
        values: float32 ``[numel]``, a multiple of the block; on the CPU.
        code: one of :data:`SIGNED` and :data:`UNSIGNED`, in which every negative number is NaN.
        random: 16 bits for each element; None: round to nearest, ties away from zero.

    Returns:
        The codes, uint8 ``[numel]``, and the scales, float32 ``[numel / BLOCK_NUMEL]``. Infinity stays, every NaN
        becomes the same one, and neither counts for the scale. Between zero and the smallest code, a signed number is
        rounded like any other, and one without a sign up: a denominator is never made zero.
    """
    drop = code.dropped_bits
    bits = values.view(torch.int32).long() & _MASK
    magnitude = bits & 0x7FFFFFFF if code.signed else bits
    finite = torch.where(magnitude < _INFINITY, magnitude, 0).view(-1, BLOCK_NUMEL)
    # The largest number is at most twice the scale: to cut it off there would draw a moment that falls toward zero.
    exponent = ((finite.amax(1) - 1) >> 23).clamp(min=LEAST_EXPONENT)
    one = (exponent << 23).repeat_interleave(BLOCK_NUMEL)
    added = 1 << (drop - 1) if random is None else (random << (drop - 16)) | (1 << (drop - 17))
    number = ((magnitude + added) >> drop) - (one >> drop) + code.one
    number = number.minimum(torch.where(one == _LARGEST_SCALE, code.largest - 1, code.largest))  # finite stays finite
    least = one - ((code.one - 1) << drop)
    if code.signed:
        share = 0.5 if random is None else random.float() * 2.0**-16
        tiny = magnitude.to(torch.int32).view(torch.float32) > least.to(torch.int32).view(torch.float32) * share
    else:
        tiny = magnitude > 0
    number = torch.where(magnitude < least, tiny.long(), number)
    number = torch.where(magnitude == _INFINITY, code.infinity, number)
    if code.signed:
        number = number | ((bits >> 24) & 0x80)
    number = torch.where(magnitude > _INFINITY, code.nan, number)
    return number.to(torch.uint8), (exponent << 23).to(torch.int32).view(torch.float32)


@functools.cache
def table_of(code: ByteCode) -> Tensor:
    """Return the number of each code for a scale of 1: float32 ``[256]``, on the CPU."""
    numbers = torch.arange(code.nan + 1, dtype=torch.int64, device="cpu")
    values = ((127 << 23) + ((numbers - code.one) << code.dropped_bits)).to(torch.int32).view(torch.float32)
    values[0], values[code.infinity], values[code.nan] = 0.0, math.inf, math.nan
    return torch.cat([values, -values]) if code.signed else values


def decode_bytes(codes: Tensor, scales: Tensor, code: ByteCode) -> Tensor:
    """Return the float32 values, each the product of a number from :func:`table_of` and its block's scale: exact."""
    table = table_of(code).to(codes.device)
    values = table[codes.long()].view(-1, BLOCK_NUMEL) * scales.view(-1, 1)
    return values.view(-1)

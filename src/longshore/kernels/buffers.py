"""Buffers of a tile's state: float32 tensors ``[arrays, numel]``, or blocks with states in bfloat16 or 8 bits.

docs/states.md states the bits. A step decodes the states, computes in float32, and encodes the results. Encoding rounds
stochastically: a number between two codes becomes one or the other, with probabilities such that its expected value is
itself. Rounding to nearest would leave a second moment where it is, as one step with ``beta2=0.999`` changes it by less
than half a unit in the last place. The random bits depend on the seed, the parameter's name, the element's place in the
whole parameter and the step count alone, so neither tiles, threads, ranks nor resuming change them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from longshore.layout.formats import BLOCK_NUMEL, StateFormat

# -- random bits ---------------------------------------------------------------


_MASK = 0xFFFFFFFF
_STEP_FACTOR = 0x9E3779B97F4A7C15
PLACE_FACTOR = 0x9E3779B9
"""Factor of the upper half of an element's place."""
MIX_FACTORS = 0x21F0AAAD, 0x735A2D97
"""Factors of the hash in :func:`random_bits`, which is one of those that C. Wellons' "Hash Prospector" (2018) measures:
for numbers that count up, each bit of the result is as good as random."""

_CODED_NUMEL = 1 << 20
"""Elements that are encoded or decoded at a time by the code in this file."""


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


def new_buffer(
    format: StateFormat, arrays: int, numel: int, own_master: bool, allocate: Callable[[int], Tensor]
) -> Buffer:
    """Return a buffer in memory from ``allocate``, which makes so many float32 zeros; see :class:`EncodedBuffer`."""
    block = allocate(format.buffer_bytes(arrays, numel, own_master) // 4)
    if format is StateFormat.FP32:
        return block.view(arrays - own_master, numel)
    return EncodedBuffer(block, format, own_master, arrays - own_master, numel)


class EncodedBuffer:
    """A block of memory with the master, unless it is elsewhere, and behind it states that are not float32: one after
    the other, each in whole words of 4 bytes, and then the scales of 8-bit states.

    It has the attributes of a tensor ``[arrays, numel]`` that do not depend on its elements' dtype.

    Args:
        block: float32 of ``format.buffer_bytes(arrays, numel, own_master)`` bytes.
        format: not FP32.
        own_master: whether the master is elsewhere.
        arrays: the number of arrays in the block.
        numel: the number of elements of each.
    """

    def __init__(self, block: Tensor, format: StateFormat, own_master: bool, arrays: int, numel: int) -> None:
        masters = 0 if own_master else 1
        self.own_master = own_master
        self.block = block
        self.format = format
        self.shape = torch.Size((arrays, numel))
        self.nbytes = block.nbytes
        self.device = block.device
        self.master = block[: masters * numel]
        states, words = arrays - masters, format.state_words(numel)
        scale_words = -(-numel // BLOCK_NUMEL) if format is StateFormat.EIGHT_BIT else 0
        code_words, behind = words - scale_words, block[masters * numel :]
        codes = behind[: states * code_words].view(states, code_words)
        self._codes = codes.view(torch.int16 if format is StateFormat.BF16 else torch.uint8)[:, :numel]
        self._scales = behind[states * code_words :].view(states, scale_words)

    def data_ptr(self) -> int:
        return self.block.data_ptr()

    def zero_(self) -> EncodedBuffer:
        self.block.zero_()
        return self

    def decoded(self, state: int, elements: slice, never_negative: bool) -> Tensor:
        """Return some elements of one state, counted from 0: float32, flat, on the buffer's device."""
        codes = self._codes[state, elements]
        if self.format is StateFormat.BF16:
            return decode_bfloat16(codes)
        scales = self._scales[state, _blocks(elements)]
        parts = [
            decode_bytes(part, scales[_blocks(slice(begin, begin + part.numel()))], _code(never_negative))
            for begin, part in _parts(codes)
        ]
        return torch.cat(parts) if parts else self.master.new_empty(0)

    def encode(
        self, state: int, elements: slice, never_negative: bool, values: Tensor, random: Tensor | None = None
    ) -> None:
        """Set some elements of one state to ``values`` (flat), rounded to nearest, or with 16 ``random`` bits each."""
        codes, scales = self._codes[state, elements], self._scales[state, _blocks(elements)]
        for begin, part in _parts(values):
            part = part.to(device="cpu", dtype=torch.float32).contiguous()
            if never_negative:
                part = part + 0.0  # -0.0 becomes 0.0
            there = slice(begin, begin + part.numel())
            bits = None if random is None else random[there]
            if self.format is StateFormat.BF16:
                codes[there] = encode_bfloat16(part, bits).to(codes.device)
            else:
                encoded, scaled = encode_bytes(part, _code(never_negative), bits)
                codes[there] = encoded.to(codes.device)
                scales[_blocks(there)] = scaled.to(codes.device)

    def copy_elements(self, other: EncodedBuffer, elements: slice) -> None:
        for mine, its in ((self.master, other.master), (self._codes, other._codes)):
            mine[..., elements] = its[..., elements]
        self._scales[:, _blocks(elements)] = other._scales[:, _blocks(elements)]

    def zero_elements(self, elements: slice) -> None:
        for array in (self.master, self._codes):
            array[..., elements].zero_()
        self._scales[:, _blocks(elements)].zero_()

    def take_states(self, other: EncodedBuffer, states: list[int]) -> None:
        """Copy the master and all states of ``other``, whose places here are ``states``."""
        self.master.copy_(other.master)
        self._codes[states] = other._codes
        self._scales[states] = other._scales


def _blocks(elements: slice) -> slice:
    return slice(elements.start // BLOCK_NUMEL, -(-elements.stop // BLOCK_NUMEL))


def _code(never_negative: bool) -> ByteCode:
    return UNSIGNED if never_negative else SIGNED


def _parts(values: Tensor) -> list[tuple[int, Tensor]]:
    return [(index * _CODED_NUMEL, part) for index, part in enumerate(values.split(_CODED_NUMEL)) if part.numel() > 0]


Buffer = Tensor | EncodedBuffer
"""One version of a tile's state. Where the states are float32, a tensor ``[arrays, numel]``: the master, unless it is
elsewhere, and the states."""


def format_of(buffer: Buffer) -> StateFormat:
    return StateFormat.FP32 if isinstance(buffer, Tensor) else buffer.format


def block_of(buffer: Buffer) -> Tensor:
    """Return all memory of a buffer as one tensor."""
    return buffer if isinstance(buffer, Tensor) else buffer.block


def float32_arrays(buffer: Buffer) -> Tensor:
    """Return a buffer, whose states are float32, as a tensor ``[arrays, numel]``."""
    assert isinstance(buffer, Tensor)
    return buffer


def element_bytes(buffer: Buffer) -> float:
    """Return the bytes of a buffer for each of its elements."""
    return buffer.nbytes / max(1, buffer.shape[1])


def master_of(buffer: Buffer) -> Tensor:
    """Return the master of a buffer that has one: a view, float32 ``[numel]``."""
    return buffer[0] if isinstance(buffer, Tensor) else buffer.master


def read_state(buffer: Buffer, from_last: int, elements: slice, never_negative: bool) -> Tensor:
    """Return some elements of a state, float32: a view, or decoded. ``from_last`` counts from the last array, 1."""
    if isinstance(buffer, Tensor):
        return buffer[-from_last, elements]
    return buffer.decoded(len(buffer._codes) - from_last, elements, never_negative)


def write_state(buffer: Buffer, from_last: int, elements: slice, never_negative: bool, values: Tensor) -> None:
    """Set some elements of a state, rounded to nearest; see :func:`read_state`."""
    if isinstance(buffer, Tensor):
        buffer[-from_last, elements].copy_(values)
    else:
        buffer.encode(len(buffer._codes) - from_last, elements, never_negative, values)


def copy_elements(target: Buffer, source: Buffer, elements: slice) -> None:
    """Copy some elements of each array between buffers of one format."""
    if isinstance(target, Tensor):
        target[:, elements] = cast(Tensor, source)[:, elements]
    else:
        target.copy_elements(cast(EncodedBuffer, source), elements)


def zero_elements(buffer: Buffer, elements: slice) -> None:
    """Zero some elements of each array."""
    if isinstance(buffer, Tensor):
        buffer[:, elements].zero_()
    else:
        buffer.zero_elements(elements)


def take_arrays(target: Buffer, source: Buffer, rows: list[int]) -> None:
    """Copy all arrays of ``source``, whose rows in ``target`` are ``rows``; both have a master, or neither has."""
    if isinstance(target, Tensor):
        target[rows] = cast(Tensor, source)
    else:
        masters = int(not target.own_master)
        target.take_states(cast(EncodedBuffer, source), [row - masters for row in rows[masters:]])

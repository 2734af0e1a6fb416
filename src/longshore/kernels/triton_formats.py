"""Triton code that reads and writes numbers in memory: parameters, gradients, and states in any format.

The bits of states that are not float32 are stated in :mod:`longshore.kernels.buffers`, and their memory in
:class:`longshore.kernels.buffers.EncodedBuffer`.
"""

# Triton compiles the source of these functions: what pyright takes for plain Python values are blocks of elements.
# pyright: basic, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

from longshore.kernels import buffers

NONE = tl.constexpr(0)
FLOAT32 = tl.constexpr(1)
BFLOAT16 = tl.constexpr(2)
FLOAT16 = tl.constexpr(3)
"""Codes of dtypes, as in the native kernels."""

SIGNED = tl.constexpr(4)
UNSIGNED = tl.constexpr(5)
"""Codes of states of 8 bits, each with the :class:`~longshore.kernels.buffers.ByteCode` of that name. The code of a
state that is not there is NONE. BFLOAT16 states are rounded stochastically."""

BLOCK = tl.constexpr(1024)
"""Number of elements that one program steps or copies."""
SCALE_NUMEL = tl.constexpr(buffers.BLOCK_NUMEL)
"""Number of elements of a state of 8 bits that share a scale; BLOCK is a multiple of it."""
INFINITY = tl.constexpr(0x7F800000)
"""Bits of the float32."""
NAN_BITS = tl.constexpr(0x7FC00000)
"""Bits of the NaN that a rule writes, as in native/nan.inl."""
LARGEST_SCALE = tl.constexpr(0x7F000000)
"""Bits of 2**127."""
FIRST_MIX = tl.constexpr(buffers.MIX_FACTORS[0])
SECOND_MIX = tl.constexpr(buffers.MIX_FACTORS[1])
PLACE_FACTOR = tl.constexpr(buffers.PLACE_FACTOR)
LEAST_EXPONENT = tl.constexpr(buffers.LEAST_EXPONENT)
SIGNED_BITS = tl.constexpr(buffers.SIGNED.mantissa_bits)
SIGNED_ONE = tl.constexpr(buffers.SIGNED.one)
UNSIGNED_BITS = tl.constexpr(buffers.UNSIGNED.mantissa_bits)
UNSIGNED_ONE = tl.constexpr(buffers.UNSIGNED.one)


# Conversions between float32 and bfloat16 or float16, with the integer arithmetic of native/convert.h: a GPU's own
# conversions change the bits of a NaN, so that the parameter would no longer be its rounded master.


@triton.jit
def bits_of(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def canonical(x):
    """Return the numbers with one NaN for all, instead of the device's."""
    u = bits_of(x)
    return float_of(tl.where((u & 0x7FFFFFFF) > INFINITY, NAN_BITS, u).to(tl.uint32))


@triton.jit
def widen_bfloat16(bits):
    return float_of(bits.to(tl.uint32) << 16)


@triton.jit
def round_to_bfloat16(x):
    u = bits_of(x)
    rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
    quiet_nan = (u >> 16) | 0x40
    return tl.where((u & 0x7FFFFFFF) > 0x7F800000, quiet_nan, rounded).to(tl.uint16)


@triton.jit
def widen_float16(bits):
    u = bits.to(tl.uint32)
    sign = (u & 0x8000) << 16
    magnitude = u & 0x7FFF
    # Re-bias the exponent by 112; infinity and NaN (exponent 31) by 224.
    normal = (magnitude << 13) + tl.where(magnitude >= 0x7C00, 0x70000000, 0x38000000).to(tl.uint32)
    subnormal = bits_of(magnitude.to(tl.int32).to(tl.float32) * 5.9604644775390625e-08)  # 2**-24: exact
    return float_of(sign | tl.where(magnitude < 0x400, subnormal, normal))


@triton.jit
def round_to_float16(x):
    u = bits_of(x)
    sign = (u >> 16) & 0x8000
    magnitude = u & 0x7FFFFFFF
    normal = (magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13
    # The unit in the last place of the float32 0.5 is the smallest float16, so the addition rounds to it.
    subnormal = bits_of(float_of(magnitude) + 0.5) - 0x3F000000
    special = tl.where(magnitude > 0x7F800000, 0x7E00 | ((magnitude >> 13) & 0x3FF), 0x7C00)
    result = tl.where(magnitude < 0x38800000, subnormal, normal)
    result = tl.where(magnitude >= 0x47800000, special, result)
    return (sign | result).to(tl.uint16)


@triton.jit
def load_float(address, at, mask, dtype):
    """Load elements as float32; masked ones are zero."""
    if dtype == FLOAT32:
        values = tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask, other=0.0)
    elif dtype == BFLOAT16:
        values = widen_bfloat16(tl.load(address.to(tl.pointer_type(tl.uint16)) + at, mask, other=0))
    else:
        values = widen_float16(tl.load(address.to(tl.pointer_type(tl.uint16)) + at, mask, other=0))
    return values


@triton.jit
def store_rounded(address, at, values, mask, dtype):
    """Store elements rounded to nearest even, keeping NaN; store nothing if the dtype is NONE."""
    if dtype == FLOAT32:
        tl.store(address.to(tl.pointer_type(tl.float32)) + at, values, mask)
    elif dtype == BFLOAT16:
        tl.store(address.to(tl.pointer_type(tl.uint16)) + at, round_to_bfloat16(values), mask)
    elif dtype == FLOAT16:
        tl.store(address.to(tl.pointer_type(tl.uint16)) + at, round_to_float16(values), mask)


# States that are not float32: the arithmetic of longshore.kernels.buffers, in uint32 instead of int64.


@triton.jit
def random_bits(first, second, places):
    """Return 32 random bits for each element, from the lower and upper half of a rounding key, both uint32, and from
    places in the parameter, int64."""
    x = places.to(tl.uint32) ^ first
    x = (x ^ (x >> 16)) * FIRST_MIX
    x = x ^ (second + (places >> 32).to(tl.uint32) * PLACE_FACTOR)
    x = (x ^ (x >> 15)) * SECOND_MIX
    return x ^ (x >> 15)


@triton.jit
def encode_bfloat16(values, random):
    """Round stochastically, with 16 random bits for each element."""
    u = bits_of(values)
    magnitude = u & 0x7FFFFFFF
    rounded = tl.minimum((magnitude + random) >> 16, 0x7F7F)
    signed = tl.where(magnitude == INFINITY, 0x7F80, rounded) | ((u >> 16) & 0x8000)
    return tl.where(magnitude > INFINITY, 0x7FC0, signed).to(tl.uint16)


@triton.jit
def decode_bytes(codes, scales, CODE: tl.constexpr):
    """Return the float32 values of codes, given each element's scale. A scale is a power of two, and no product is
    denormal, so adding exponents gives the product."""
    MANTISSA: tl.constexpr = SIGNED_BITS if CODE == SIGNED else UNSIGNED_BITS
    SIGN: tl.constexpr = 0x80 if CODE == SIGNED else 0
    NAN: tl.constexpr = 0xFF - SIGN
    ONE: tl.constexpr = SIGNED_ONE if CODE == SIGNED else UNSIGNED_ONE
    u = codes.to(tl.uint32)
    number = u & NAN
    bits = bits_of(scales) + ((number - ONE) << (23 - MANTISSA))
    bits = tl.where(number == 0, 0, bits)
    bits = tl.where(number == NAN - 1, INFINITY, bits)
    bits = tl.where(number == NAN, NAN_BITS, bits)
    return float_of(bits | ((u & SIGN) << 24))


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def encode_bytes(values, random, CODE: tl.constexpr):
    """Return the codes of BLOCK values, rounded stochastically with 16 random bits for each, and the scales: float32
    ``[BLOCK / SCALE_NUMEL]``."""
    MANTISSA: tl.constexpr = SIGNED_BITS if CODE == SIGNED else UNSIGNED_BITS
    SIGN: tl.constexpr = 0x80 if CODE == SIGNED else 0
    NAN: tl.constexpr = 0xFF - SIGN
    ONE: tl.constexpr = SIGNED_ONE if CODE == SIGNED else UNSIGNED_ONE
    DROPPED: tl.constexpr = 23 - MANTISSA
    u = bits_of(values)
    magnitude = u & 0x7FFFFFFF if CODE == SIGNED else u  # without a sign, a negative number is above INFINITY: NaN
    finite = tl.reshape(tl.where(magnitude < INFINITY, magnitude, 0), [BLOCK // SCALE_NUMEL, SCALE_NUMEL])
    largest = tl.maximum(tl.reduce(finite, 1, larger), 1)
    scales = tl.maximum((largest - 1) >> 23, LEAST_EXPONENT) << 23
    scale = tl.reshape(tl.broadcast_to(scales[:, None], [BLOCK // SCALE_NUMEL, SCALE_NUMEL]), [BLOCK])
    added = (random << (DROPPED - 16)) | 2 ** (DROPPED - 17)
    number = ((magnitude + added) >> DROPPED) - (scale >> DROPPED) + ONE
    # The largest number is twice the scale; where that would be infinity, finite values stay finite.
    number = tl.minimum(number, tl.where(scale == LARGEST_SCALE, NAN - 3, NAN - 2).to(tl.uint32))
    least = scale - ((ONE - 1) << DROPPED)
    if CODE == SIGNED:
        share = random.to(tl.uint16).to(tl.float32) * 1.52587890625e-05  # 2**-16: exact
        tiny = float_of(magnitude) > float_of(least) * share
    else:
        tiny = magnitude > 0
    number = tl.where(magnitude < least, tiny.to(tl.uint32), number)
    number = tl.where(magnitude == INFINITY, NAN - 1, number) | ((u >> 24) & SIGN)
    number = tl.where(magnitude > INFINITY, NAN, number)
    return number.to(tl.uint8), float_of(scales)


# States in a tile's buffer, whose arrays have `numel` elements each. `STATE` is 0 or 1; the codes of both begin with
# words of 4 bytes, and the scales are behind the codes of the last of them.


@triton.jit
def codes_of(buffer, numel, begin, STATE: tl.constexpr, CODE: tl.constexpr):
    """Return pointers to the codes of BLOCK elements of a state from ``begin`` on."""
    lane = tl.arange(0, BLOCK)
    if CODE == FLOAT32:
        codes = buffer + begin + lane + (1 + STATE) * numel
    elif CODE == BFLOAT16:
        codes = (buffer + (numel + STATE * ((numel + 1) // 2))).to(tl.pointer_type(tl.uint16)) + begin + lane
    else:
        codes = (buffer + (numel + STATE * ((numel + 3) // 4))).to(tl.pointer_type(tl.uint8)) + begin + lane
    return codes


@triton.jit
def scales_of(buffer, numel, STATE: tl.constexpr, STATES: tl.constexpr):
    """Return a pointer to the scales of a state of 8 bits."""
    return buffer + (numel + STATES * ((numel + 3) // 4) + STATE * ((numel + SCALE_NUMEL - 1) // SCALE_NUMEL))


@triton.jit
def load_state(buffer, numel, begin, count, STATE: tl.constexpr, STATES: tl.constexpr, CODE: tl.constexpr):
    """Load BLOCK elements of a state from ``begin`` on as float32; those behind ``count`` are masked."""
    lane = tl.arange(0, BLOCK)
    mask = lane < count
    values = tl.load(codes_of(buffer, numel, begin, STATE, CODE), mask, other=0)
    if CODE == BFLOAT16:
        values = widen_bfloat16(values)
    elif CODE != FLOAT32:
        scales = tl.load(scales_of(buffer, numel, STATE, STATES) + (begin + lane) // SCALE_NUMEL, mask, other=0.0)
        values = decode_bytes(values, scales, CODE)
    return values


@triton.jit
def store_state(
    buffer, numel, begin, count, values, random, STATE: tl.constexpr, STATES: tl.constexpr, CODE: tl.constexpr
):
    """Store BLOCK elements of a state from ``begin`` on; those behind ``count`` are masked. The lower half of
    ``random`` rounds the first state, the upper one the second.

    With states of 8 bits, a segment begins and ends where elements that share a scale do, so that none of these are
    masked alone.
    """
    codes = codes_of(buffer, numel, begin, STATE, CODE)
    mask = tl.arange(0, BLOCK) < count
    half = random & 0xFFFF if STATE == 0 else random >> 16
    if CODE == FLOAT32:
        tl.store(codes, values, mask)
    elif CODE == BFLOAT16:
        tl.store(codes, encode_bfloat16(values, half), mask)
    else:
        encoded, scales = encode_bytes(values, half, CODE)
        tl.debug_barrier()  # in place, another thread may not have read the old scale yet
        tl.store(codes, encoded, mask)
        block = tl.arange(0, BLOCK // SCALE_NUMEL)
        pointers = scales_of(buffer, numel, STATE, STATES) + (begin // SCALE_NUMEL + block)
        tl.store(pointers, scales, block < count // SCALE_NUMEL)

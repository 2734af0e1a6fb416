"""The kernels of :class:`longshore.kernels.device.DeviceKernels`, in Triton.

The arithmetic is stated in :mod:`longshore.kernels.reference`; here it has the
same operations in the same order. Triton may join a multiplication and an
addition into one operation that rounds once, unless it is launched with
``enable_fp_fusion=False``: then ``tl.fma`` is the only one that does. A plain
``/`` or ``tl.sqrt`` is an approximation on a GPU; ``tl.div_rn`` and
``tl.sqrt_rn`` round to nearest even. None of these flushes denormals.

A tensor is an address here, an int64, with the code of its dtype beside it. So
each kernel is compiled once, whatever mix of dtypes a tile has; the branch on
the dtype is the same for all elements of a program.
"""

# Triton reads these functions' source: what pyright sees as calls on plain
# Python values are operations on blocks.
# pyright: basic, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from longshore.kernels.scalars import COLUMNS

NONE = tl.constexpr(0)
FLOAT32 = tl.constexpr(1)
BFLOAT16 = tl.constexpr(2)
FLOAT16 = tl.constexpr(3)
"""Codes of dtypes, as in the native kernels."""

ADAM = tl.constexpr(1)
LION = tl.constexpr(2)
ADAGRAD = tl.constexpr(3)
SGD = tl.constexpr(4)
"""Codes of rules, as in scalars.py."""

SEGMENT_COLUMNS = tl.constexpr(8)
"""int64 columns of a tile's table: page offset, elements, gradient and its dtype, output and its
dtype, rule, and the first program of the segment."""

SPAN_COLUMNS = tl.constexpr(4)
"""int64 columns of a span: address of the parameter's first element, dtype, begin, end."""

SCALARS = tl.constexpr(COLUMNS)
"""Float32 columns of a rule: the gradient's two factors, and the rule's own scalars."""

STEP_BLOCK = tl.constexpr(1024)
PASS_BLOCK = tl.constexpr(1024)
NORM_LANES = tl.constexpr(16)
NORM_UNROLL = tl.constexpr(8)


# -- float32 <-> bfloat16 and float16 -----------------------------------------
# The integer arithmetic of native/convert.h: a GPU's own conversions replace NaN
# by another, and the parameter would no longer be its rounded master.


@triton.jit
def bits_of(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


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
    # One unit in the last place of 0.5 is the smallest float16: the adder rounds to it.
    subnormal = bits_of(float_of(magnitude) + 0.5) - 0x3F000000
    special = tl.where(magnitude > 0x7F800000, 0x7E00 | ((magnitude >> 13) & 0x3FF), 0x7C00)
    result = tl.where(magnitude < 0x38800000, subnormal, normal)
    result = tl.where(magnitude >= 0x47800000, special, result)
    return (sign | result).to(tl.uint16)


@triton.jit
def load_float(address, at, mask, dtype):
    """Elements as float32; zero where masked."""
    if dtype == FLOAT32:
        values = tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask, other=0.0)
    elif dtype == BFLOAT16:
        values = widen_bfloat16(tl.load(address.to(tl.pointer_type(tl.uint16)) + at, mask, other=0))
    else:
        values = widen_float16(tl.load(address.to(tl.pointer_type(tl.uint16)) + at, mask, other=0))
    return values


@triton.jit
def store_rounded(address, at, values, mask, dtype):
    """Elements rounded to nearest even, NaN kept; nothing where the dtype is NONE."""
    if dtype == FLOAT32:
        tl.store(address.to(tl.pointer_type(tl.float32)) + at, values, mask)
    elif dtype == BFLOAT16:
        tl.store(address.to(tl.pointer_type(tl.uint16)) + at, round_to_bfloat16(values), mask)
    elif dtype == FLOAT16:
        tl.store(address.to(tl.pointer_type(tl.uint16)) + at, round_to_float16(values), mask)


# -- rules --------------------------------------------------------------------
# A rule is a function of its scalars (the columns that scalars.py fills), the
# scaled gradient and the page's arrays at the same elements; step_tile does the rest.


@triton.jit
def adam(scalars, g, p, m, v):
    """Adam and AdamW: the new master and moments."""
    decay = tl.load(scalars)
    l2 = tl.load(scalars + 1)
    lerp_weight = tl.load(scalars + 2)
    lerp_from_gradient = tl.load(scalars + 3)
    beta2 = tl.load(scalars + 4)
    one_minus_beta2 = tl.load(scalars + 5)
    root_correction = tl.load(scalars + 6)
    eps = tl.load(scalars + 7)
    negative_step_size = tl.load(scalars + 8)
    if l2 != 0.0:
        g = tl.fma(p, l2, g)
    else:
        p = p * decay
    m = tl.fma(lerp_weight, g - m, tl.where(lerp_from_gradient != 0.0, g, m))
    v = tl.fma(one_minus_beta2 * g, g, v * beta2)
    denominator = tl.div_rn(tl.sqrt_rn(v), root_correction) + eps
    p = p + tl.div_rn(negative_step_size * m, denominator)
    return p, m, v


@triton.jit
def lion(scalars, g, p, m):
    """The new master and moment."""
    decay = tl.load(scalars)
    beta1 = tl.load(scalars + 1)
    one_minus_beta1 = tl.load(scalars + 2)
    beta2 = tl.load(scalars + 3)
    one_minus_beta2 = tl.load(scalars + 4)
    negative_lr = tl.load(scalars + 5)
    c = tl.fma(one_minus_beta1, g, m * beta1)
    sign = tl.where(c > 0.0, 1.0, 0.0)
    sign = tl.where(c < 0.0, -1.0, sign)
    sign = tl.where(c != c, c, sign)  # NaN
    p = p * decay + negative_lr * sign
    m = tl.fma(one_minus_beta2, g, m * beta2)
    return p, m


@triton.jit
def adagrad(scalars, g, p, total):
    """The new master and sum of squares."""
    l2 = tl.load(scalars)
    eps = tl.load(scalars + 1)
    negative_step_size = tl.load(scalars + 2)
    if l2 != 0.0:
        g = tl.fma(p, l2, g)
    total = tl.fma(g, g, total)
    denominator = tl.sqrt_rn(total) + eps
    p = p + tl.div_rn(negative_step_size * g, denominator)
    return p, total


@triton.jit
def sgd(scalars, g, p, buffer):
    """The new master and momentum buffer; without momentum the buffer is not looked at."""
    l2 = tl.load(scalars)
    momentum = tl.load(scalars + 1)
    one_minus_dampening = tl.load(scalars + 2)
    negative_lr = tl.load(scalars + 3)
    first = tl.load(scalars + 4)
    nesterov = tl.load(scalars + 5)
    if l2 != 0.0:
        g = tl.fma(p, l2, g)
    if momentum != 0.0:
        if first != 0.0:
            buffer = g
        else:
            buffer = tl.fma(one_minus_dampening, g, buffer * momentum)
        if nesterov != 0.0:
            g = tl.fma(buffer, momentum, g)
        else:
            g = buffer
    p = tl.fma(g, negative_lr, p)
    return p, buffer


@triton.jit(do_not_specialize=["page_numel"])
def step_tile(
    source_page, target_page, page_numel, table, owners, all_scalars, RULE: tl.constexpr, PAGE_ARRAYS: tl.constexpr
):
    """One program steps one block of one segment.

    All of an element is read before any of it is written, by the one program
    that has it: in place, and an output over its own gradient, are sound.
    """
    program = tl.program_id(0)
    stride = page_numel.to(tl.int64)
    row = table + tl.load(owners + program) * SEGMENT_COLUMNS
    page_offset = tl.load(row)
    numel = tl.load(row + 1)
    scalars = all_scalars + tl.load(row + 6) * SCALARS
    at = (program - tl.load(row + 7)) * STEP_BLOCK + tl.arange(0, STEP_BLOCK)
    mask = at < numel
    source = source_page + page_offset + at
    target = target_page + page_offset + at
    g = load_float(tl.load(row + 2), at, mask, tl.load(row + 3))
    g = g * tl.load(scalars) * tl.load(scalars + 1)
    p = tl.load(source, mask, other=0.0)
    first = g  # stands for a buffer where there is none
    if PAGE_ARRAYS > 1:
        first = tl.load(source + stride, mask, other=0.0)
    if RULE == ADAM:
        second = tl.load(source + 2 * stride, mask, other=0.0)
        p, first, second = adam(scalars + 2, g, p, first, second)
        tl.store(target + 2 * stride, second, mask)
    elif RULE == LION:
        p, first = lion(scalars + 2, g, p, first)
    elif RULE == ADAGRAD:
        p, first = adagrad(scalars + 2, g, p, first)
    else:
        p, first = sgd(scalars + 2, g, p, first)
    tl.store(target, p, mask)
    if PAGE_ARRAYS > 1:
        tl.store(target + stride, first, mask)
    store_rounded(tl.load(row + 4), at, p, mask, tl.load(row + 5))


# -- passes that are not steps ------------------------------------------------


@triton.jit(do_not_specialize=["target", "source", "dtype", "numel", "add"])
def accumulate(target, source, dtype, numel, add):
    at = tl.program_id(0).to(tl.int64) * PASS_BLOCK + tl.arange(0, PASS_BLOCK)
    mask = at < numel
    values = load_float(source, at, mask, dtype)
    pointers = target.to(tl.pointer_type(tl.float32)) + at
    if add != 0:
        values = tl.load(pointers, mask, other=0.0) + values
    tl.store(pointers, values, mask)


@triton.jit(do_not_specialize=["master", "parameter", "dtype", "numel", "adopt"])
def reconcile(master, parameter, dtype, numel, adopt, differing):
    """Sets ``differing``, a byte for each element; with ``adopt``, such a master becomes the element."""
    at = tl.program_id(0).to(tl.int64) * PASS_BLOCK + tl.arange(0, PASS_BLOCK)
    mask = at < numel
    masters = tl.load(master.to(tl.pointer_type(tl.float32)) + at, mask, other=0.0)
    values = load_float(parameter, at, mask, dtype)
    if dtype == FLOAT32:
        differs = bits_of(masters) != bits_of(values)
    elif dtype == BFLOAT16:
        stored = tl.load(parameter.to(tl.pointer_type(tl.uint16)) + at, mask, other=0)
        differs = round_to_bfloat16(masters) != stored
    else:
        stored = tl.load(parameter.to(tl.pointer_type(tl.uint16)) + at, mask, other=0)
        differs = round_to_float16(masters) != stored
    tl.store(differing + at, differs.to(tl.uint8), mask)
    if adopt != 0:
        tl.store(master.to(tl.pointer_type(tl.float32)) + at, values, mask & differs)


@triton.jit
def add_squares(total, address, begin, end, factors, DTYPE: tl.constexpr):
    """Add the squares of elements ``[begin, end)`` of one parameter to its lanes, one row after the other."""
    lane = tl.arange(0, NORM_LANES)
    first = tl.load(factors)
    second = tl.load(factors + 1)
    for row in range(begin // NORM_LANES, (end + NORM_LANES - 1) // NORM_LANES, NORM_UNROLL):
        for ahead in tl.static_range(NORM_UNROLL):
            at = (row + ahead) * NORM_LANES + lane
            mask = (at >= begin) & (at < end)
            x = load_float(address, at, mask, DTYPE) * first * second
            # An element that is not there adds 0, which changes no sum of squares.
            x = tl.where(mask, x, 0.0).to(tl.float64)
            total += x * x  # the product of two float32 numbers is exact in float64
    return total


@triton.jit
def sum_of_squares(starts, spans, factors, sums):
    """One program adds one block of one parameter into its lanes.

    An element's lane is its offset in the parameter modulo NORM_LANES, and a
    lane adds in order, as in native/buffers.cpp: the same bits.
    """
    block = tl.program_id(0)
    lane = tl.arange(0, NORM_LANES)
    total = tl.full([NORM_LANES], 0.0, tl.float64)
    for span in range(tl.load(starts + block), tl.load(starts + block + 1)):
        row = spans + span * SPAN_COLUMNS
        address = tl.load(row)
        dtype = tl.load(row + 1)
        begin = tl.load(row + 2)
        end = tl.load(row + 3)
        if dtype == FLOAT32:
            total = add_squares(total, address, begin, end, factors, FLOAT32)
        elif dtype == BFLOAT16:
            total = add_squares(total, address, begin, end, factors, BFLOAT16)
        else:
            total = add_squares(total, address, begin, end, factors, FLOAT16)
    tl.store(sums + block * NORM_LANES + lane, total)


INTERPRETED = not isinstance(step_tile, triton.JITFunction)
"""Whether ``TRITON_INTERPRET=1`` was set when this file was imported."""

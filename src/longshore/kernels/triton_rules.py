"""Triton code of the kernels of :class:`longshore.kernels.device.DeviceKernels`.

The arithmetic of a rule is its ``update``, which :func:`device_function` compiles. Triton may fuse a multiplication and
an addition into one operation that rounds once, unless a kernel is launched with ``enable_fp_fusion=False``: then only
``tl.fma`` does so. A plain ``/`` or ``tl.sqrt`` is an approximation on a GPU; ``tl.div_rn`` and ``tl.sqrt_rn``
round to nearest even. None of these flushes denormals.

A tensor is passed as its address, an int64, and the code of its dtype. Each kernel is thus compiled once for any mix of
dtypes in a tile; the branch on the dtype is the same for all elements of a program. The codes of a tile's states are
constants, so a step with states of another format is compiled by itself.
"""

# Triton compiles the source of these functions: what pyright takes for plain Python values are blocks of elements.
# pyright: basic, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

import builtins
import functools
import types

import triton
import triton.language as tl

from longshore.kernels.triton_formats import (
    BFLOAT16,
    BLOCK,
    FLOAT16,
    FLOAT32,
    NONE,
    SIGNED,
    UNSIGNED,
    bits_of,
    canonical,
    load_float,
    load_state,
    random_bits,
    round_to_bfloat16,
    round_to_float16,
    store_rounded,
    store_state,
)
from longshore.layout.formats import NEVER_NEGATIVE, StateFormat

SEGMENT_COLUMNS = tl.constexpr(12)
"""int64 columns of a tile's table: buffer offset, elements, gradient and its dtype, output and its dtype, offset of the
rule's scalars, first program of the segment, elements of each array of the buffer, lower and upper half of the rounding
key, place in the parameter."""

SPAN_COLUMNS = tl.constexpr(4)
"""int64 columns of a span: address of the parameter's first element, dtype, begin, end."""

CHECKSUM_COLUMNS = tl.constexpr(4)
"""int64 columns of a checksum: address, dtype, elements, first program."""

CHECKSUM_FACTOR = tl.constexpr(0x1E3779B97F4A7C15)
"""As in longshore.kernels.reference."""

CHECKSUM_BLOCKS = tl.constexpr(64)
"""Number of blocks of one parameter that one program adds up."""

NORM_LANES = tl.constexpr(16)
NORM_UNROLL = tl.constexpr(8)


@triton.jit
def adopted(masters, parameter, at, mask, dtype):
    """Return the masters, with the elements of ``parameter`` whose bits differ from the rounded master in their place,
    and where these are."""
    differs = mask & (masters != masters)  # nowhere; gives the variable its type
    if dtype == FLOAT32:
        stored = tl.load(parameter.to(tl.pointer_type(tl.uint32)) + at, mask, other=0)
        differs = mask & (bits_of(masters) != stored)
    elif dtype == BFLOAT16:
        stored = tl.load(parameter.to(tl.pointer_type(tl.uint16)) + at, mask, other=0)
        differs = mask & (round_to_bfloat16(masters) != stored)
    elif dtype == FLOAT16:
        stored = tl.load(parameter.to(tl.pointer_type(tl.uint16)) + at, mask, other=0)
        differs = mask & (round_to_float16(masters) != stored)
    values = load_float(parameter, at, differs, dtype)
    return tl.where(differs, values, masters), differs


# Replacements for the operations of longshore.kernels.reference, with which a rule's update() is compiled.


@triton.jit
def scalar(scalars, index: tl.constexpr):
    return tl.load(scalars + index)


@triton.jit
def fma(a, b, c):
    return tl.fma(a, b, c)


@triton.jit
def divide(a, b):
    return tl.div_rn(a, b)


@triton.jit
def root(values):
    return tl.sqrt_rn(values)


@triton.jit
def where(condition, yes, no):
    return tl.where(condition, yes, no)


_NAMES = {"tl": tl, "scalar": scalar, "fma": fma, "divide": divide, "root": root, "where": where}
_NAMES |= {"Tensor": tl.tensor, "Scalars": tl.tensor}  # Triton looks up the types of parameters too


@functools.cache
def device_function(update):
    """Return the ``update`` of a :class:`~longshore.kernels.Rule`, compiled with the operations of Triton."""
    scope = {**_NAMES, "__name__": update.__module__, "__builtins__": builtins}
    jit = type(scalar)  # compiled or interpreted, like the functions of this module
    return jit(types.FunctionType(update.__code__, scope, update.__name__))


def state_codes(states, format):
    """Return the arguments ``FIRST`` and ``SECOND`` of :func:`step_tile` for a buffer that has the named states."""
    codes = {StateFormat.FP32: FLOAT32, StateFormat.BF16: BFLOAT16, StateFormat.EIGHT_BIT: SIGNED}
    squares = UNSIGNED if format is StateFormat.EIGHT_BIT else codes[format]
    found = [squares if name in NEVER_NEGATIVE else codes[format] for name in states]
    return [code.value for code in (*found, NONE, NONE)[:2]]


@triton.jit
def step_tile(
    source_buffer,
    target_buffer,
    table,
    owners,
    scalar_rows,
    UPDATE: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    ADOPT: tl.constexpr,
    OUTPUT_LAST: tl.constexpr,
):
    """Step a tile; each program steps one block of one segment. ``FIRST`` and ``SECOND`` are the codes of the buffer's
    states, or NONE.

    A program reads all values of an element before it writes any, so a step may be in place or overwrite its gradient.
    """
    STATES: tl.constexpr = 1 if SECOND == NONE else 2
    program = tl.program_id(0)
    row = table + tl.load(owners + program) * SEGMENT_COLUMNS
    stride = tl.load(row + 8)
    scalars = scalar_rows + tl.load(row + 6)  # the gradient's two factors, and the rule's own
    begin = (program - tl.load(row + 7)) * BLOCK
    count = tl.load(row + 1) - begin
    at = begin + tl.arange(0, BLOCK)
    mask = tl.arange(0, BLOCK) < count
    begin += tl.load(row)  # in the buffer
    g = load_float(tl.load(row + 2), at, mask, tl.load(row + 3))
    g = g * tl.load(scalars) * tl.load(scalars + 1)
    p = tl.load(source_buffer + begin + tl.arange(0, BLOCK), mask, other=0.0)
    if ADOPT:
        p, _ = adopted(p, tl.load(row + 4), at, mask, tl.load(row + 5))
    first = g  # stands for a state that the buffer does not have
    if FIRST != NONE:
        first = load_state(source_buffer, stride, begin, count, 0, STATES, FIRST)
    # Where states are float32, nothing reads these bits, and the compiler leaves them out.
    random = random_bits(tl.load(row + 9).to(tl.uint32), tl.load(row + 10).to(tl.uint32), tl.load(row + 11) + at)
    if SECOND != NONE:
        second = load_state(source_buffer, stride, begin, count, 1, STATES, SECOND)
        p, first, second = UPDATE(scalars + 2, g, p, first, second)
        store_state(target_buffer, stride, begin, count, canonical(second), random, 1, STATES, SECOND)
    else:
        p, first = UPDATE(scalars + 2, g, p, first)
    p = canonical(p)
    first = canonical(first)
    tl.store(target_buffer + begin + tl.arange(0, BLOCK), p, mask)
    if FIRST != NONE:
        store_state(target_buffer, stride, begin, count, first, random, 0, STATES, FIRST)
    if OUTPUT_LAST:
        p = first
    store_rounded(tl.load(row + 4), at, p, mask, tl.load(row + 5))


@triton.jit(do_not_specialize=["target", "source", "dtype", "numel", "add"])
def accumulate(target, source, dtype, numel, add):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    values = load_float(source, at, mask, dtype)
    pointers = target.to(tl.pointer_type(tl.float32)) + at
    if add != 0:
        values = canonical(tl.load(pointers, mask, other=0.0) + values)
    tl.store(pointers, values, mask)


@triton.jit(do_not_specialize=["master", "parameter", "dtype", "numel", "adopt"])
def reconcile(master, parameter, dtype, numel, adopt, differing):
    """Set a byte of ``differing`` for each element; with ``adopt``, copy those that differ to the master."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    masters = tl.load(master.to(tl.pointer_type(tl.float32)) + at, mask, other=0.0)
    values, differs = adopted(masters, parameter, at, mask, dtype)
    tl.store(differing + at, differs.to(tl.uint8), mask)
    if adopt != 0:
        tl.store(master.to(tl.pointer_type(tl.float32)) + at, values, mask & differs)


@triton.jit
def add_squares(total, address, begin, end, factors, DTYPE: tl.constexpr):
    """Add the squares of elements ``[begin, end)`` of one parameter to the lanes of ``total``, row by row."""
    lane = tl.arange(0, NORM_LANES)
    first = tl.load(factors)
    second = tl.load(factors + 1)
    for row in range(begin // NORM_LANES, (end + NORM_LANES - 1) // NORM_LANES, NORM_UNROLL):
        for ahead in tl.static_range(NORM_UNROLL):
            at = (row + ahead) * NORM_LANES + lane
            mask = (at >= begin) & (at < end)
            x = load_float(address, at, mask, DTYPE) * first * second
            # A masked element adds 0, which changes no sum of squares.
            x = tl.where(mask, x, 0.0).to(tl.float64)
            total += x * x  # the product of two float32 numbers is exact in float64
    return total


@triton.jit
def sum_of_squares(starts, spans, factors, sums):
    """Add up squares; each program adds one block of one parameter into the lanes of its sum.

    An element's lane is its offset in the parameter modulo NORM_LANES, and a lane adds in order, which gives the same
    bits as native/buffers.cpp.
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


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def checksums(table, owners, sums):
    """Compute :func:`longshore.kernels.reference.checksum`; each program adds blocks of one tensor to its sum. Sums are
    modulo 2**64, so the order of the programs does not matter."""
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    row = table + owner * CHECKSUM_COLUMNS
    address = tl.load(row)
    dtype = tl.load(row + 1)
    numel = tl.load(row + 2)
    first = (program - tl.load(row + 3)) * CHECKSUM_BLOCKS * BLOCK
    total = tl.full([BLOCK], 0, tl.int64)
    for block in range(tl.minimum(CHECKSUM_BLOCKS, (numel - first + BLOCK - 1) // BLOCK)):
        at = first + block * BLOCK + tl.arange(0, BLOCK)
        mask = at < numel
        if dtype == FLOAT32:
            bits = tl.load(address.to(tl.pointer_type(tl.uint32)) + at, mask, other=0).to(tl.int64)
        else:
            bits = tl.load(address.to(tl.pointer_type(tl.uint16)) + at, mask, other=0).to(tl.int64)
        mixed = ((at << 32) | bits) * CHECKSUM_FACTOR
        mixed = mixed ^ ((mixed >> 32) & 0xFFFFFFFF)
        total += tl.where(mask, mixed, 0)
    tl.atomic_add(sums + owner, tl.reduce(total, 0, add))


INTERPRETED = not isinstance(step_tile, triton.JITFunction)
"""Whether ``TRITON_INTERPRET=1`` was set when this file was imported."""

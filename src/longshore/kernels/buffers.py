"""Buffers of a tile's state: float32 tensors ``[arrays, numel]``, or blocks with states of another format."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from longshore.kernels.formats import (
    SIGNED,
    UNSIGNED,
    ByteCode,
    decode_bfloat16,
    decode_bytes,
    encode_bfloat16,
    encode_bytes,
)
from longshore.layout.formats import BLOCK_NUMEL, StateFormat

_CODED_NUMEL = 1 << 20
"""Elements that are encoded or decoded at a time by the code in this file."""


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

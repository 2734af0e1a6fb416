"""What the kernel tests of states that are not float32 share: buffers, their parts, and the oracle's step."""

from __future__ import annotations

import torch
from torch import Tensor

from longshore.kernels import UNSCALED, Rule, Scale, TileSegment
from longshore.kernels.buffers import EncodedBuffer, new_buffer
from longshore.kernels.reference import encoded_step
from longshore.layout.formats import BLOCK_NUMEL, NEVER_NEGATIVE, StateFormat
from tests.kernels.numbers import ZEROS_AND_DENORMALS, awkward, same_bits


def of_all_kinds(numel: int, seed: int, size: float = 1.0) -> Tensor:
    """Blocks that share a scale, in turn: with all special values, of normal numbers alone, of some that are too small
    beside the largest, with one that can be rounded up to infinity, of tiny ones, of zeros and denormals. The largest
    special value of a block makes its other codes zero."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(numel, generator=generator) * size
    least = torch.tensor(ZEROS_AND_DENORMALS)[torch.randint(0, 5, (numel,), generator=generator)]
    wide = normal * 2.0 ** -torch.randint(0, 20, (numel,), generator=generator)
    place = torch.arange(numel)
    huge = torch.where(place % BLOCK_NUMEL == 17, torch.finfo(torch.float32).max, normal)
    kinds = torch.stack([awkward(numel, seed + 1, size), normal, wide, huge, normal * 1e-19, least])
    return kinds.gather(0, (place // BLOCK_NUMEL % len(kinds))[None])[0]


def empty_buffer(
    format: StateFormat, states: int, numel: int, own_master: bool = False, value: float = 0.0
) -> EncodedBuffer:
    """A buffer whose memory is filled with a float32 value."""
    made = new_buffer(format, 1 + states, numel, own_master, lambda words: torch.full((words,), value))
    assert isinstance(made, EncodedBuffer)
    return made


def encoded_buffer(
    format: StateFormat, rule: Rule, numel: int, seed: int, own_master: bool = False, states: int | None = None
) -> EncodedBuffer:
    """Masters and states of all kinds; ``states``: their number, where a rule may lack some."""
    names = rule.states[:states]
    buffer = empty_buffer(format, len(names), numel, own_master)
    buffer.master.copy_(awkward(numel, seed)[: buffer.master.numel()])
    for state, name in enumerate(names):
        values = of_all_kinds(numel, seed + 10 * state, 0.01)
        never_negative = name in NEVER_NEGATIVE
        buffer.encode(state, slice(0, numel), never_negative, values.square() if never_negative else values)
    return buffer


def copy_of(buffer: EncodedBuffer) -> EncodedBuffer:
    return EncodedBuffer(buffer.block.clone(), buffer.format, buffer.own_master, *buffer.shape)


def same_buffers(found: EncodedBuffer, expected: EncodedBuffer) -> bool:
    """Equal masters, codes and scales; words between them count, too."""
    masters = expected.master.numel()
    blocks = [each.block[masters:].view(torch.int32).cpu() for each in (found, expected)]
    return same_bits(found.master.cpu(), expected.master) and torch.equal(*blocks)


def _views(buffer: EncodedBuffer, elements: slice) -> list[Tensor]:
    blocks = slice(elements.start // BLOCK_NUMEL, -(-elements.stop // BLOCK_NUMEL))
    master = [] if buffer.own_master else [buffer.master[elements]]
    return [*master, buffer._codes[:, elements], buffer._scales[:, blocks]]


def step_part(
    source: EncodedBuffer,
    target: EncodedBuffer,
    segment: TileSegment,
    rule: Rule,
    scale: Scale = UNSCALED,
    parameter: Tensor | None = None,
) -> Tensor:
    """Step one segment by the oracle from ``source`` into ``target``, and return its new masters; ``parameter``: what
    its output holds before, if that is read."""
    numel = segment.gradient.numel()
    elements = slice(segment.buffer_offset, segment.buffer_offset + numel)
    states = source.shape[0] - (not source.own_master)
    part = empty_buffer(source.format, states, numel, source.own_master)
    for mine, its in zip(_views(part, slice(0, numel)), _views(source, elements), strict=True):
        mine.copy_(its)
    stepped, master = encoded_step(part, segment.gradient, rule, segment.coding, scale, parameter)
    for mine, its in zip(_views(target, elements), _views(stepped, slice(0, numel)), strict=True):
        mine.copy_(its)
    return master

"""The arguments of kernels on any device: rules, scales and the segments of a tile."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor


class Scale(NamedTuple):
    """What gradients are multiplied by in float32: ``first``, then ``second``.

    There are two if the loss scale is no power of two: unscaling and clipping round as separate operations do.
    """

    first: float = 1.0
    second: float = 1.0


UNSCALED = Scale()


@dataclass(frozen=True)
class Rule(ABC):
    """The hyper-parameters of one parameter group, for parameters at one step count.

    A subclass is a frozen dataclass with the hyper-parameters as fields. A field ``step`` is the count after this step,
    1 the first time. It is an argument of every call: the kernels keep no state, so two tiles cannot differ.
    """

    name: ClassVar[str]
    """The rule's entry in ``native/rules.inl``."""
    states: ClassVar[tuple[str, ...]]
    """The arrays of a buffer after the master, one or two, by the names that torch gives them."""
    update: ClassVar[Callable[..., tuple[Tensor, ...]]]
    """The arithmetic: ``update(scalars, gradient, master, *states)`` returns the new master and states. It is written
    with the operations of :mod:`longshore.kernels.reference`; on a GPU those of Triton take their place."""
    optional_states: ClassVar[int] = 0
    """How many of the states a buffer may lack."""

    maximize: bool = field(default=False, kw_only=True)

    @cached_property
    def scalars(self) -> tuple[float, ...]:
        """The numbers that the arithmetic reads: computed in double, rounded to float32 by the kernels."""
        raise NotImplementedError


class TorchRule(NamedTuple):
    """One step of an elementwise optimizer of ``torch.optim``, on host tiles."""

    kind: str
    """The name of the optimizer in ``torch.optim``."""
    options: tuple[tuple[str, Any], ...]
    """The group's options, as numbers."""
    rows: tuple[tuple[str, int], ...]
    """The states that the step reads and writes, as torch names them, and their rows of the buffer."""
    step: int
    """The count after this step, as in :class:`Rule`."""
    first: bool
    """There is no state yet: torch makes it."""
    scalars: tuple[tuple[str, float], ...] = ()
    """States that are one number for the whole parameter, before the step."""


HostRule = Rule | TorchRule
"""A rule that :class:`~longshore.kernels.HostKernels` can step by."""


class TileSegment(NamedTuple):
    """One row of a tile's table.

    ``gradient`` is a flat, contiguous tensor; ``output`` is another of as many elements, or the gradient's own memory,
    or None. ``buffer_offset`` counts elements; ``rule`` is an index into the rules of the call.
    """

    buffer_offset: int
    gradient: Tensor
    output: Tensor | None
    rule: int


NORM_BLOCK_NUMEL = 1 << 16
"""Elements of a parameter whose squares are added into one number; kPieceNumel of native/buffers.h."""


def total_of_blocks(parameters: Iterable[Iterable[float]]) -> float:
    """The sum of squares from those of the blocks of each parameter. The order makes the bits."""
    total = 0.0
    for blocks in parameters:
        for block in blocks:
            total += block
    return total


DTYPE_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""Codes of dtypes in native/buffers.h and in triton_rules.py."""

SUPPORTED_DTYPES = tuple(DTYPE_CODES)
"""Dtypes of parameters and gradients that the kernels read and write."""

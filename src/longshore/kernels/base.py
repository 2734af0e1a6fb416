"""Arguments of kernels on any device: rules, scales and the segments of a tile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from longshore.layout.formats import FLOAT32_STATES, Coding

ARITHMETIC = 1
"""Version of the arithmetic of all rules: raised where a rule gives other bits on the same numbers. Which processor
computes a step is no part of it: the bits are the same on each."""


class Scale(NamedTuple):
    """Factors by which gradients are multiplied in float32: ``first``, then ``second``.

    Both are used if the loss scale is not a power of two: unscaling and clipping then round separately.
    """

    first: float = 1.0
    second: float = 1.0


UNSCALED = Scale()


MOST_STATES = 2
"""States of the largest buffer: one less than kMostArrays in native/kernels.h."""


@dataclass(frozen=True)
class Rule(ABC):
    """The hyper-parameters of one parameter group, for parameters at one step count.

    A subclass is a frozen dataclass with the hyper-parameters as fields. ``step`` is the count after this step, 1 for
    the first. It is an argument of every call: the kernels keep no state, so the counts of tiles cannot differ.
    """

    name: ClassVar[str]
    """The rule's entry in ``native/rules.inl``."""
    states: ClassVar[tuple[str, ...]]
    """Names of the arrays of a buffer after the master, at most :data:`MOST_STATES`, as in torch."""
    update: ClassVar[Callable[..., tuple[Tensor, ...]]]
    """The arithmetic: ``update(scalars, gradient, master, *states)`` returns the new master and states. It is written
    with the operations of :mod:`longshore.kernels.reference`, which Triton's operations replace on a GPU."""
    optional_states: ClassVar[int] = 0
    """Number of states that a buffer may lack."""
    outputs_last: ClassVar[bool] = False
    """Whether outputs get the last array that ``update`` returns, which no buffer has, and not the master."""

    maximize: bool = field(default=False, kw_only=True)
    step: int = field(default=1, kw_only=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if len(states := getattr(cls, "states", ())) > MOST_STATES:
            raise TypeError(
                f"{cls.__name__} has {len(states)} states, {', '.join(states)}, and the kernels step at most "
                f"{MOST_STATES} beside the master: use a rule with fewer states"
            )

    @cached_property
    def scalars(self) -> tuple[float, ...]:
        """Numbers that the arithmetic reads: computed in float64, and rounded to float32 by the kernels."""
        raise NotImplementedError


class OneElement(NamedTuple):
    """A tensor of one element among an optimizer's options: torch computes with it in its dtype."""

    value: float
    dtype: torch.dtype


class TorchRule(NamedTuple):
    """One step of an elementwise optimizer of ``torch.optim``, on host tiles."""

    kind: str
    """Name of the optimizer in ``torch.optim``."""
    options: tuple[tuple[str, Any], ...]
    """The group's options, as numbers; tensors are a :class:`OneElement`."""
    rows: tuple[tuple[str, int], ...]
    """Names in torch of the states that the step reads and writes, with their rows behind the master, from 1."""
    step: int
    """The count after this step, as in :class:`Rule`."""
    first: bool
    """Whether there is no state yet, so that torch creates it."""
    scalars: tuple[tuple[str, float], ...] = ()
    """States that are one number for the whole parameter, with their values before the step."""


MATRIX_STATE, MATRIX_MASTER = slice(-1, None), slice(None, -1)
"""The arrays of a buffer over which the first pass of a :class:`MatrixRule` goes, and the last; the master may be
elsewhere."""


class MatrixRule(ABC):
    """One step of a rule that treats each matrix as a whole: ``first`` on its elements, then :meth:`transform`, then
    :meth:`last` on its elements. A subclass is a frozen dataclass."""

    state: ClassVar[str]
    """Name of the one state, as in torch."""

    @property
    @abstractmethod
    def first(self) -> Rule:
        """Rule of the first pass, over the state alone; its outputs, bfloat16, are to be transformed."""

    @abstractmethod
    def transform(self, matrix: Tensor) -> Tensor:
        """Return the input of the last pass, which reads it as its gradient.

        Args:
            matrix: bfloat16 ``[rows, columns]``, contiguous; its memory may be written.

        Returns:
            bfloat16 ``[rows, columns]``, contiguous.
        """

    @abstractmethod
    def last(self, rows: int, columns: int) -> Rule:
        """Return the rule of the last pass, over the master alone, for a matrix of this shape."""

    @abstractmethod
    def workspace_bytes(self, rows: int, columns: int) -> int:
        """Return the most bytes that :meth:`transform` takes at a time, its argument and result included."""


HostRule = Rule | TorchRule | MatrixRule
"""A rule by which a store can step. The kernels have no :class:`MatrixRule`, only its passes."""


class Pass(NamedTuple):
    """One traversal of the elements of tiles by one rule.

    Attributes:
        arrays: the arrays of float32 buffers that it reads and writes; None: all, of buffers of any format.
        output_dtype: dtype of its outputs; None: that of the parameters.
    """

    rule: HostRule
    arrays: slice | None = None
    output_dtype: torch.dtype | None = None


def pass_ahead(rule: HostRule) -> Pass:
    """Return the part of a step that may go ahead of the verdict: the passes before any that needs more than one
    element at a time.

    A transformation ahead would take memory and time of a device that needs both for backward, and would meet other
    ranks.
    """
    return Pass(rule.first, MATRIX_STATE, torch.bfloat16) if isinstance(rule, MatrixRule) else Pass(rule)


class TileSegment(NamedTuple):
    """One row of a tile's table.

    ``gradient`` is a flat, contiguous tensor; ``output`` is another one of as many elements, a view of the gradient's
    memory, or None. ``buffer_offset`` counts elements; ``rule`` is an index into the rules of the call. ``coding`` says
    with which random bits states that are not float32 are rounded.
    """

    buffer_offset: int
    gradient: Tensor
    output: Tensor | None
    rule: int
    coding: Coding = FLOAT32_STATES


def total_of_blocks(parameters: Iterable[Iterable[float]]) -> float:
    """Add up the sums of squares of the blocks of each parameter. The order of addition determines the bits."""
    total = 0.0
    for blocks in parameters:
        for block in blocks:
            total += block
    return total


DTYPE_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""Codes of dtypes in native/buffers.h and in triton_rules.py."""

SUPPORTED_DTYPES = tuple(DTYPE_CODES)
"""Dtypes of parameters and gradients that the kernels read and write."""

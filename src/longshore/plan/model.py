"""A model as a plan sees it: names, shapes and dtypes of its parameters, and what forward computes with them.

No tensors are made; :mod:`longshore.plan.reading` reads models from modules and files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch


class Use(Enum):
    """What forward does with a parameter."""

    MULTIPLIED = "multiplied"
    """Every token is multiplied by it: two operations an element in forward, four in backward."""
    LOOKED_UP = "looked up"
    """An embedding: each token takes one row."""
    HEAD = "head"
    """Multiplied; gives the logits, one number for each entry of the vocabulary."""
    ELEMENTWISE = "elementwise"
    """Norms and biases."""


@dataclass(frozen=True)
class PlannedParameter:
    """One parameter; a tied parameter is listed once."""

    name: str  # the first of its names
    shape: tuple[int, ...]  # its whole shape, not a shard's
    dtype: torch.dtype  # the model's own; a configuration may cast it
    use: Use
    unit: int | None = None  # number, in forward's order, of the module that stage 3 gathers it with; None: the model
    active: float = 1.0  # share of its elements that one token is multiplied by (below 1 for experts)
    trainable: bool = True  # it has gradients and optimizer state

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def multiplied(self) -> float:
        """Elements that one token is multiplied by."""
        return self.active * self.numel if self.use in (Use.MULTIPLIED, Use.HEAD) else 0.0

    @property
    def width(self) -> float:
        """Numbers that go into and come out of the matrix for one token."""
        if self.use is not Use.MULTIPLIED or len(self.shape) < 2:
            return 0.0
        *outer, rows, columns = self.shape
        return self.active * math.prod(outer) * (rows + columns)


@dataclass(frozen=True)
class PlannedModel:
    """A whole model."""

    name: str
    parameters: tuple[PlannedParameter, ...]  # in the order in which the model registers them
    hidden_size: int = 0  # numbers of a token between two blocks; 0: not known
    attention_width: int = 0  # heads times head size, summed over all layers; 0: attention is not counted
    buffer_bytes: int = 0  # bytes of buffers, which are on the device
    notes: tuple[str, ...] = ()  # assumptions that were made

    @property
    def numel(self) -> int:
        return sum(each.numel for each in self.parameters)

    @property
    def trainable(self) -> tuple[PlannedParameter, ...]:
        return tuple(each for each in self.parameters if each.trainable)

    @property
    def units(self) -> int:
        """Number of modules that stage 3 gathers as a whole, without the model itself."""
        return 1 + max((each.unit for each in self.parameters if each.unit is not None), default=-1)

    @property
    def vocabulary(self) -> int:
        """Logits of one token; 0: the model has no head."""
        return max((each.shape[0] for each in self.parameters if each.use is Use.HEAD), default=0)

    @property
    def main_dtype(self) -> torch.dtype:
        """The dtype of most elements of floating-point parameters."""
        numels: dict[torch.dtype, int] = {}
        for each in self.parameters:
            if each.dtype.is_floating_point:
                numels[each.dtype] = numels.get(each.dtype, 0) + each.numel
        return max(numels, key=lambda dtype: numels[dtype], default=torch.float32)

    def cast(self, dtype: torch.dtype | None) -> PlannedModel:
        """The model as the engine casts it; None leaves it as it is."""
        if dtype is None or all(each.dtype == dtype for each in self.parameters):
            return self
        cast = (replace(each, dtype=dtype) if each.dtype.is_floating_point else each for each in self.parameters)
        return replace(self, parameters=tuple(cast))


def parameter_bytes(parameters: Sequence[PlannedParameter]) -> int:
    return sum(each.numel * each.dtype.itemsize for each in parameters)


def by_unit(parameters: Sequence[PlannedParameter]) -> Mapping[int | None, list[PlannedParameter]]:
    """Parameters grouped by the unit that stage 3 gathers them with."""
    found: dict[int | None, list[PlannedParameter]] = {}
    for each in parameters:
        found.setdefault(each.unit, []).append(each)
    return found

"""A model as a plan sees it: names, shapes and dtypes of its parameters, and what is computed with them.

Pure: no tensors. Where it comes from is :mod:`longshore.plan.modules` and :mod:`longshore.plan.headers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import torch

ALL_EXPERTS = "experts are counted as if every token used all of them"
"""A note, where nothing tells how many are used."""


class Use(Enum):
    """What forward does with a parameter."""

    MULTIPLIED = "multiplied"
    """Each token is multiplied by it: two operations an element, and four in backward."""
    LOOKED_UP = "looked up"
    """An embedding: a row for each token."""
    HEAD = "head"
    """Multiplied, and the result is one number for each entry of the vocabulary, which the loss is made of."""
    ELEMENTWISE = "elementwise"
    """Norms and biases."""


@dataclass(frozen=True)
class PlannedParameter:
    """One parameter; a tied one is there once.

    Attributes:
        name: the first of its names.
        shape: of all of it.
        dtype: as the model has it; a configuration may cast it.
        use: what forward does with it.
        unit: the module that stage 3 gathers it with, by its number in forward's order; None: with the model itself.
        active: of its elements, the part that one token is multiplied by (experts: fewer than all).
        trainable: it has a master, moments and gradients.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    use: Use
    unit: int | None = None
    active: float = 1.0
    trainable: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def multiplied(self) -> float:
        """Elements that one token is multiplied by."""
        return self.active * self.numel if self.use in (Use.MULTIPLIED, Use.HEAD) else 0.0

    @property
    def width(self) -> float:
        """Numbers that go in and come out for one token."""
        if self.use is not Use.MULTIPLIED or len(self.shape) < 2:
            return 0.0
        *outer, rows, columns = self.shape
        return self.active * math.prod(outer) * (rows + columns)


@dataclass(frozen=True)
class PlannedModel:
    """All of a model.

    Attributes:
        name: for titles.
        parameters: in the order in which the model registers them.
        hidden_size: numbers of a token between two blocks; 0: not known.
        attention_width: heads times their size, over all layers together; 0: attention is not counted.
        buffer_bytes: of buffers, on the device.
        notes: what had to be assumed.
    """

    name: str
    parameters: tuple[PlannedParameter, ...]
    hidden_size: int = 0
    attention_width: int = 0
    buffer_bytes: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def numel(self) -> int:
        return sum(each.numel for each in self.parameters)

    @property
    def trainable(self) -> tuple[PlannedParameter, ...]:
        return tuple(each for each in self.parameters if each.trainable)

    @property
    def units(self) -> int:
        """Modules that stage 3 gathers as a whole, the model itself left aside."""
        return 1 + max((each.unit for each in self.parameters if each.unit is not None), default=-1)

    @property
    def vocabulary(self) -> int:
        """Numbers that the loss is made of, for one token; 0: there is no such head."""
        return max((each.shape[0] for each in self.parameters if each.use is Use.HEAD), default=0)

    @property
    def main_dtype(self) -> torch.dtype:
        """That most elements of floating-point parameters have."""
        numels: dict[torch.dtype, int] = {}
        for each in self.parameters:
            if each.dtype.is_floating_point:
                numels[each.dtype] = numels.get(each.dtype, 0) + each.numel
        return max(numels, key=lambda dtype: numels[dtype], default=torch.float32)

    def cast(self, dtype: torch.dtype | None) -> PlannedModel:
        """As the engine casts it; None: as it is."""
        if dtype is None or all(each.dtype == dtype for each in self.parameters):
            return self
        return replace(
            self,
            parameters=tuple(
                replace(each, dtype=dtype) if each.dtype.is_floating_point else each for each in self.parameters
            ),
        )


def parameter_bytes(parameters: Sequence[PlannedParameter]) -> int:
    return sum(each.numel * each.dtype.itemsize for each in parameters)


def by_unit(parameters: Sequence[PlannedParameter]) -> Mapping[int | None, list[PlannedParameter]]:
    """Parameters by what they are gathered with."""
    found: dict[int | None, list[PlannedParameter]] = {}
    for each in parameters:
        found.setdefault(each.unit, []).append(each)
    return found

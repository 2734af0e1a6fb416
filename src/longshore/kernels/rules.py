"""What a step is told: hyper-parameters and gradient scale, as plain numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class AdamRule(NamedTuple):
    """The hyper-parameters of one group for parameters at one step count.

    ``step`` is the count after this step, 1 the first time. It is an argument
    of every call: the kernels keep no state, so two tiles cannot differ.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    decoupled: bool
    """AdamW's weight decay; otherwise Adam's, a term in the gradient."""
    maximize: bool = False
    bias_correction: bool = True
    """False: the moments count as they are, and ``step`` changes nothing."""


class LionRule(NamedTuple):
    """The hyper-parameters of one group; weight decay is decoupled."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    maximize: bool = False


class AdagradRule(NamedTuple):
    """The hyper-parameters of one group for parameters at one step count, as in :class:`AdamRule`."""

    lr: float
    lr_decay: float
    eps: float
    weight_decay: float
    step: int
    maximize: bool = False


class SGDRule(NamedTuple):
    """The hyper-parameters of one group, for parameters with or without a momentum buffer.

    Without momentum a page may do without the buffer; one that is there is
    not changed.
    """

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    first: bool
    """There is no momentum buffer yet: it becomes the gradient."""
    maximize: bool = False


Rule = AdamRule | LionRule | AdagradRule | SGDRule
"""What the native kernels step by."""


class TorchRule(NamedTuple):
    """A step that one of ``torch.optim``'s elementwise optimizers makes, on host tiles."""

    kind: str
    """The name of the optimizer in ``torch.optim``."""
    options: tuple[tuple[str, Any], ...]
    """The group's options, as numbers."""
    rows: tuple[tuple[str, int], ...]
    """The states that the step reads and writes, as torch names them, and their rows of the page."""
    step: int
    """The count after this step, as in :class:`AdamRule`."""
    first: bool
    """There is no state yet: torch makes it."""
    scalars: tuple[tuple[str, float], ...] = ()
    """States that are one number for the whole parameter, before the step."""


HostRule = Rule | TorchRule
"""What :class:`~longshore.kernels.HostKernels` step by."""


class TileSegment(NamedTuple):
    """One row of a tile's table.

    ``gradient`` is a flat, contiguous host tensor of ``numel`` elements;
    ``output`` the same, or None, or the gradient's own memory. ``page_offset``
    counts elements; ``rule`` is an index into the rules of the call.
    """

    page_offset: int
    gradient: Tensor
    output: Tensor | None
    rule: int


class Scale(NamedTuple):
    """What gradients are multiplied by in float32: ``first``, then ``second``.

    Two factors where the loss scale is no power of two, so that unscaling and
    clipping round as they do when they are separate operations.
    """

    first: float = 1.0
    second: float = 1.0


UNSCALED = Scale()

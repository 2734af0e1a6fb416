"""What kernels are told, whatever device their tensors are on: rules, segments and scales, checked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor


class Scale(NamedTuple):
    """What gradients are multiplied by in float32: ``first``, then ``second``.

    Two factors where the loss scale is no power of two, so that unscaling and
    clipping round as they do when they are separate operations.
    """

    first: float = 1.0
    second: float = 1.0


UNSCALED = Scale()


@dataclass(frozen=True)
class Rule(ABC):
    """The hyper-parameters of one parameter group, for parameters at one step count.

    A subclass is a frozen dataclass with the hyper-parameters as fields. A field
    ``step`` is the count after this step, 1 the first time. It is an argument of
    every call: the kernels keep no state, so two tiles cannot differ.
    """

    name: ClassVar[str]
    """The rule's entry in ``native/rules.inl``."""
    states: ClassVar[tuple[str, ...]]
    """The arrays of a page after the master, one or two, by the names that torch gives them."""
    update: ClassVar[Callable[..., tuple[Tensor, ...]]]
    """The arithmetic: ``update(scalars, gradient, master, *states)`` returns the new master and states. It is written
    with the operations of :mod:`longshore.kernels.reference`; on a GPU those of Triton take their place."""

    maximize: bool = field(default=False, kw_only=True)

    @property
    @abstractmethod
    def scalars(self) -> tuple[float, ...]:
        """What the element-wise pass reads: computed in double, rounded to float32 by the kernels."""

    def factors(self, scale: Scale) -> tuple[float, float]:
        """What the gradient is multiplied by, one factor after the other."""
        return -scale.first if self.maximize else scale.first, scale.second

    def check(self, page_arrays: int) -> None:
        """Raise ``ValueError`` for a page of another number of arrays, or a step count below 1."""
        check_arrays(self.name, page_arrays, 1 + len(self.states), 1 + len(self.states))
        if getattr(self, "step", 1) < 1:
            raise ValueError("a step count below 1")


class TorchRule(NamedTuple):
    """A step that one of ``torch.optim``'s elementwise optimizers makes, on host tiles."""

    kind: str
    """The name of the optimizer in ``torch.optim``."""
    options: tuple[tuple[str, Any], ...]
    """The group's options, as numbers."""
    rows: tuple[tuple[str, int], ...]
    """The states that the step reads and writes, as torch names them, and their rows of the page."""
    step: int
    """The count after this step, as in :class:`Rule`."""
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


class Kernels(Protocol):
    """:class:`~longshore.kernels.HostKernels` or :class:`~longshore.kernels.DeviceKernels`:
    the same bits from the same arguments, which are tensors on ``device``."""

    @property
    def device(self) -> torch.device:
        """Where the tensors of every call are."""
        ...

    @property
    def asynchronous(self) -> bool:
        """Whether calls return before their work is done, which is then done in stream order."""
        ...

    def step_tile(
        self,
        source_page: Tensor,
        target_page: Tensor,
        segments: Sequence[TileSegment],
        rules: Sequence[HostRule],
        scale: Scale = UNSCALED,
    ) -> None: ...

    def accumulate(self, target: Tensor, source: Tensor, *, add: bool) -> None: ...

    def reconcile(self, master: Tensor, parameter: Tensor, *, adopt: bool) -> int: ...

    def block_sums(self, parameters: Sequence[Sequence[Tensor]], scale: Scale = UNSCALED) -> list[list[float]]: ...


NORM_BLOCK_NUMEL = 1 << 16
"""Elements of a parameter whose squares are added into one number; kPieceNumel of native/buffers.h."""


def total_of_blocks(parameters: Iterable[Iterable[float]]) -> float:
    """The sum of squares from those of the blocks of each parameter. The order makes the bits."""
    total = 0.0
    for blocks in parameters:
        for block in blocks:
            total += block
    return total


# -- checks that host and device share ----------------------------------------

DTYPE_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
SUPPORTED_DTYPES = tuple(DTYPE_CODES)
"""Dtypes of parameters and gradients that the kernels read and write."""


def check_arrays(name: str, found: int, least: int, most: int) -> None:
    """Raise ``ValueError`` for a page that has not as many arrays as the rule ``name``."""
    if not least <= found <= most:
        raise ValueError(f"a page of {found} arrays, and {name} has {least}" + ("" if least == most else f" or {most}"))


def checked_rules(rules: Sequence[HostRule], page_arrays: int) -> list[Rule]:
    """The rules of one call.

    Raises:
        ValueError: several types, one that is torch's, pages that the rules cannot have, or a step count below 1.
    """
    kinds = {type(rule) for rule in rules}
    if len(kinds) > 1:
        raise ValueError(f"the rules of one call are of one kind, not {sorted(kind.__name__ for kind in kinds)}")
    checked = []
    for rule in rules:
        if not isinstance(rule, Rule):
            raise ValueError(f"the kernels do not step by a {type(rule).__name__}")
        rule.check(page_arrays)
        checked.append(rule)
    return checked


def check_pages(source_page: Tensor, target_page: Tensor) -> None:
    for page in (source_page, target_page):
        if page.dtype != torch.float32 or page.dim() != 2:
            raise ValueError(f"a page is float32 [page_arrays, page_numel], not {page.dtype} {list(page.shape)}")
    if source_page.shape != target_page.shape:
        raise ValueError("source and target pages differ in size")


def check_pair(target: Tensor, source: Tensor) -> None:
    if target.dtype != torch.float32:
        raise ValueError(f"masters and accumulators are float32, not {target.dtype}")
    if target.numel() != source.numel():
        raise ValueError(f"{source.numel()} elements for a buffer of {target.numel()}")


def dtype_code(tensor: Tensor) -> int:
    try:
        return DTYPE_CODES[tensor.dtype]
    except KeyError:
        raise ValueError(f"the kernels take float32, bfloat16 and float16, not {tensor.dtype}") from None

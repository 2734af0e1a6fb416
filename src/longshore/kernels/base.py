"""What every set of kernels offers, wherever its tensors are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from longshore.kernels.rules import UNSCALED, HostRule, Scale, TileSegment


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

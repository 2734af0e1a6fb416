"""Copies of states that users have."""

from __future__ import annotations

import weakref
import zlib
from typing import Any

import torch
from torch import Tensor

from longshore.errors import ParameterError
from longshore.optim.parameters import ParameterRecord
from longshore.optim.shards import flat, is_sharded


def in_order_of(parameter: Tensor, values: Tensor) -> Tensor:
    """Return flat values in the shape of a parameter, and in its order in memory, as torch makes its states: torch's
    fused kernels read both as they lie."""
    shaped = values.view(parameter.shape)
    if is_sharded(parameter) or parameter.is_contiguous():
        return shaped
    return torch.empty_like(parameter, dtype=values.dtype, device=values.device, requires_grad=False).copy_(shaped)


def is_plain(value: Any, record: ParameterRecord) -> bool:
    """Return whether a tensor can be watched as it is."""
    return (
        type(value) is Tensor
        and value.device.type == "cpu"
        and value.dtype == torch.float32
        and value.shape == record.kept.shape
        and value.is_contiguous()
        and not value.is_neg()
    )


class StateCopy:
    """A copy of one state of a parameter that was handed out.

    Args:
        memory: the copy's memory, in a tensor that nobody else has.
        handed: the tensor that the user has.
    """

    def __init__(self, memory: Tensor, handed: Tensor) -> None:
        self.memory = memory
        self.handed = weakref.ref(handed)
        self.checksum: int | None = None
        """Checksum of a copy that a step left behind, since only all ranks together can read the new state."""

    @property
    def values(self) -> Tensor:
        """The values, flat."""
        return flat(self.memory)

    def update(self, values: Tensor) -> None:
        self.memory.copy_(values.view(self.memory.shape))

    @property
    def in_use(self) -> bool:
        """Whether a tensor, a view or an array of the user's is over this memory."""
        # Two are ours: ``memory``, and the storage that is asked.
        return torch._C._storage_Use_Count(self.memory.untyped_storage()._cdata) > 2  # pyright: ignore

    def check_unedited(self, record: ParameterRecord, name: str) -> None:
        """Raise ParameterError if the copy was edited after a step had left it behind."""
        if self.checksum != self.compute_checksum():
            raise ParameterError(
                f"parameter {record.name}: {name}, which was read from optimizer.state before a step, was edited after "
                "it. The state is spread over ranks, and such a copy keeps the values before the step: read "
                "optimizer.state again after each step, and edit that"
            )

    def compute_checksum(self) -> int:
        return zlib.crc32(self.memory.numpy().tobytes())

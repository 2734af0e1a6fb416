"""Copies of states that users have, and how they are compared with the state and written to it."""

from __future__ import annotations

import weakref
import zlib
from typing import Any

import torch
from torch import Tensor

from longshore.errors import ParameterError
from longshore.optim.parameters import ParameterRecord
from longshore.optim.shards import flat, is_sharded
from longshore.optim.state import StateOwner, checked_state, write_state
from longshore.tiles import MASTER


def in_order_of(parameter: Tensor, values: Tensor) -> Tensor:
    """Return flat values in the shape of a parameter, and in its order in memory, as torch makes its states: torch's
    fused kernels read both as they lie."""
    shaped = values.view(parameter.shape)
    if is_sharded(parameter) or parameter.is_contiguous():
        return shaped
    return torch.empty_like(parameter, dtype=values.dtype, device=values.device, requires_grad=False).copy_(shaped)


def is_plain(value: Any, record: ParameterRecord, single: bool = False) -> bool:
    """Return whether a tensor can be watched as it is; ``single``: it is a number."""
    return (
        type(value) is Tensor
        and value.device.type == "cpu"
        and value.dtype == torch.float32
        and value.shape == (() if single else record.kept.shape)
        and value.is_contiguous()
        and not value.is_neg()
    )


class StateCopy:
    """A copy of one state of a parameter that was handed out.

    Args:
        memory: the copy's memory, in a tensor of its own.
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
        # Two are ours: ``memory``, and the storage that is asked. It has a name, since torch 2.8 counts it only as long
        # as it lives, and newer ones as long as a tensor does.
        storage = self.memory.untyped_storage()
        return torch._C._storage_Use_Count(storage._cdata) > 2  # pyright: ignore

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


def numbers_of(record: ParameterRecord) -> dict[str, float]:
    return {"step": float(record.history.step), **dict(record.history.scalars)}


def read_state(record: ParameterRecord, name: str, core: StateOwner) -> Tensor:
    """Return a state, flat: float32, on the CPU."""
    numbers = numbers_of(record)
    if name in numbers:
        return torch.tensor([numbers[name]], dtype=torch.float32, device="cpu")
    return core.store.read_state(record.index, name)


def differs(record: ParameterRecord, name: str, values: Tensor, core: StateOwner) -> bool:
    if name in numbers_of(record):
        return not torch.equal(values.view(torch.int32), read_state(record, name, core).view(torch.int32))
    return core.store.differs(record.index, name, values)


def write_edits(record: ParameterRecord, state: dict[str, Any], core: StateOwner) -> None:
    state |= checked_state(record, {key: state[key] for key in state.keys() & numbers_of(record)})
    # Before the first step, a master alone is meant; one in a whole state came from another parameter.
    meant = MASTER in state and ((len(state) == 1 and not record.has_state) or not _written(record, core))
    master = state[MASTER] if meant else None
    if master is not None and record.held.numel() != master.numel():
        raise ParameterError(
            f"parameter {record.name}: its master was edited in optimizer.state, and this process has a shard of the "
            "parameter: use longshore.utils.safe_set_full_fp32_param()"
        )
    write_state(record, core, state)
    if master is not None:
        record.publish_values(master)  # the master is the parameter with more digits: whoever edits it means both


def _written(record: ParameterRecord, core: StateOwner) -> bool:
    """Return whether the parameter was written, which then counts (law 10)."""
    if not record.changed or not record.has_state or not core.store.alone:  # ranks have to decide alike
        return record.changed
    return record.has_master and core.store.count_differing(record.index, record.values()) > 0

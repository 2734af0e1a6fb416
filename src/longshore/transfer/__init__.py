"""Transfers, which copy bytes between device and host: ``base``, ``device``, ``simulated``."""

from __future__ import annotations

import torch

from longshore.accelerator import is_accelerator
from longshore.transfer.base import Bundle, CopyHandle, DirectTransfer, FinishedCopy, Transfer, wait_for_all
from longshore.transfer.device import (
    DeviceCopyStream,
    DeviceFetch,
    DeviceFetchStream,
    DeviceTransfer,
    ResidentTransfer,
    RestingTransfer,
)
from longshore.transfer.pinned import PinnedPool, allocate_pinned, part_of
from longshore.transfer.private import allocate_private, copy_on_fork
from longshore.transfer.simulated import SimulatedTransfer

__all__ = [
    "Bundle",
    "CopyHandle",
    "DeviceCopyStream",
    "DeviceFetch",
    "DeviceFetchStream",
    "DeviceTransfer",
    "DirectTransfer",
    "FinishedCopy",
    "PinnedPool",
    "ResidentTransfer",
    "RestingTransfer",
    "SimulatedTransfer",
    "Transfer",
    "allocate_pinned",
    "allocate_private",
    "copy_on_fork",
    "part_of",
    "transfer_for",
    "wait_for_all",
]


def transfer_for(device: torch.device) -> Transfer:
    """Return the transfer for parameters on ``device``.

    Raises:
        ValueError: longshore does not support this type of device.
    """
    if device.type == "cpu":
        return DirectTransfer()
    if is_accelerator(device):
        return DeviceTransfer(device)
    raise ValueError(f"longshore trains parameters on the CPU and on torch's accelerator, not on {device}")

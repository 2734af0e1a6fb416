"""Transfers, which copy bytes between device and host: ``direct``, ``cuda``, ``simulated``."""

from __future__ import annotations

import torch

from longshore.transfer.base import CopyHandle, DirectTransfer, FinishedCopy, Transfer
from longshore.transfer.cuda import CudaResidentTransfer, CudaTransfer
from longshore.transfer.simulated import SimulatedTransfer

__all__ = [
    "CopyHandle",
    "CudaResidentTransfer",
    "CudaTransfer",
    "DirectTransfer",
    "FinishedCopy",
    "SimulatedTransfer",
    "Transfer",
    "transfer_for",
]


def transfer_for(device: torch.device) -> Transfer:
    """Return the transfer for parameters on ``device``.

    Raises:
        ValueError: longshore does not support this type of device.
    """
    if device.type == "cpu":
        return DirectTransfer()
    if device.type == "cuda":
        return CudaTransfer(device)
    raise ValueError(f"longshore trains parameters on cpu and cuda devices, not on {device}")

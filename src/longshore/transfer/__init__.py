"""Asynchronous copies between device and host: real ones, simulated ones, none; memory for them, and job threads."""

from __future__ import annotations

import torch

from longshore.accelerator import is_accelerator
from longshore.transfer.copy_stream import Bundle, Copy, CopyStream, CopyStreams, FinishedCopy, wait_for_all
from longshore.transfer.device import DeviceCopy, DeviceCopyStream, DeviceFetch, DeviceStreams
from longshore.transfer.host_memory import PinnedPool, allocate_pinned, allocate_private, copy_on_fork, part_of
from longshore.transfer.simulated import SimulatedTransfer

__all__ = [
    "Bundle",
    "Copy",
    "CopyStream",
    "CopyStreams",
    "DeviceCopy",
    "DeviceCopyStream",
    "DeviceFetch",
    "DeviceStreams",
    "FinishedCopy",
    "PinnedPool",
    "SimulatedTransfer",
    "allocate_pinned",
    "allocate_private",
    "copy_on_fork",
    "part_of",
    "streams_for",
    "wait_for_all",
]


def streams_for(device: torch.device) -> CopyStreams:
    """Return the copy streams between host memory and parameters on ``device``.

    Raises:
        ValueError: longshore does not support this type of device.
    """
    if device.type == "cpu":
        return CopyStreams()
    if is_accelerator(device):
        return DeviceStreams.to_host(device)
    raise ValueError(f"longshore trains parameters on the CPU and on torch's accelerator, not on {device}")

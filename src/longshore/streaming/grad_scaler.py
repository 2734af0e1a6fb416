"""``torch.amp.GradScaler`` and gradients on the host: torch copies 1 / scale to them, and does not wait for it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.amp import grad_scaler

from longshore.accelerator import is_accelerator, mark_on, wait_for

_Replicator = grad_scaler._MultiDeviceReplicator


def wait_for_scales() -> None:
    """Let scalers wait for a number that they copy from an accelerator to the host, where the CPU reads it at once.

    The scale is on the accelerator, like the loss, and the gradients of a streamed model are not. torch copies from one
    to the other with ``non_blocking=True``; its own optimizers have no parameters on the CPU then.
    """
    if not hasattr(_Replicator.get, "__wrapped__"):
        _Replicator.get = _waiting(_Replicator.get)


def _waiting(get):  # pyright: ignore
    @functools.wraps(get)
    def waiting(self: _Replicator, device: torch.device) -> Tensor:
        copied = get(self, device)
        if copied.device.type == "cpu" and is_accelerator(self.master.device):
            wait_for(mark_on(self.master.device))
        return copied

    return waiting

"""CPU parameters: device and host are the same memory, and nothing is copied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longshore.transfer.base import UnstagedTransfer


class DirectTransfer(UnstagedTransfer):
    """Parameters, gradients and state in host memory."""

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def mark(self) -> Any:
        return None

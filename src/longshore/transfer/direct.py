"""CPU parameters: device and host are the same memory, and nothing is copied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longshore.transfer.base import CopyHandle, FinishedCopy, Transfer


class DirectTransfer(Transfer):
    """The kernel reads the gradient where it is and writes the parameter where it is."""

    staged = False

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def mark(self) -> Any:
        return None

    def copy_to_host(self, source: Tensor, buffer: Tensor | None, ready: Any, after: CopyHandle | None) -> CopyHandle:
        return FinishedCopy(source)

    def output_for(self, parameter: Tensor, buffer: Tensor | None) -> Tensor:
        return parameter

    def begin_publish(self) -> None:
        return

    def copy_to_device(self, output: Tensor, parameter: Tensor) -> CopyHandle:
        if output.data_ptr() != parameter.data_ptr():  # stepped ahead, when the parameter was still in use
            parameter.copy_(output)
        return FinishedCopy(parameter)

    def end_publish(self) -> None:
        return

    def read(self, source: Tensor) -> Tensor:
        return source

    def synchronize(self) -> None:
        return

    def close(self) -> None:
        return

"""How an optimizer uses the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longshore.host import HostStore, ParameterStore
from longshore.kernels import HostKernels
from longshore.transfer import Transfer, transfer_for


class Placement(ABC):
    """Where an optimizer keeps its state: makes the store."""

    @abstractmethod
    def make_store(self, device: torch.device, hold_gradients: bool) -> ParameterStore:
        """A store for parameters on ``device``; ``hold_gradients``: they arrive during backward."""


@dataclass(frozen=True)
class Offload(Placement):
    """Settings of the host side. None of them changes a bit of the result.

    Attributes:
        tile_numel: elements a tile: the unit that is copied, stepped and copied
            back. The default is 8 MiB of bfloat16, some 300 microseconds of a
            PCIe 4 link.
        threads: host threads that step; default: one for each CPU that the
            process may use, whatever ``OMP_NUM_THREADS`` says.
        cpu_set: logical CPUs that those threads may run on; default: any.
        transfer: how bytes move; default: by the parameters' device. Tests pass
            a :class:`~longshore.transfer.SimulatedTransfer`.
    """

    tile_numel: int = 1 << 22
    threads: int | None = None
    cpu_set: Sequence[int] | None = None
    transfer: Transfer | None = None

    def __post_init__(self) -> None:
        if isinstance(self.tile_numel, bool) or not isinstance(self.tile_numel, int) or self.tile_numel < 1:
            raise ValueError(f"tile_numel is a number of elements, at least 1, not {self.tile_numel!r}")
        threads = self.threads
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise ValueError(f"threads is a number of host threads, at least 1, not {threads!r}")

    def make_store(
        self, device: torch.device, hold_gradients: bool, gradient_dtype: torch.dtype | None = None
    ) -> HostStore:
        """The store of one process; ``gradient_dtype`` where gradients have another dtype than their parameters."""
        kernels = HostKernels(self.threads, self.cpu_set)
        transfer = self.transfer or transfer_for(device)
        return HostStore(transfer, kernels, self.tile_numel, hold_gradients, gradient_dtype)

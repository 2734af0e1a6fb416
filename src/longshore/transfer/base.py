"""What every transfer offers: lanes of copies, and handles that own their buffers.

A lane is a FIFO of asynchronous copies in one direction. A copy's handle holds
the source and the target until the copy is done (law 9), whatever the caller
does with its own references; so a gradient can be let go of at once, and a
buffer is reused only by a copy that was told to wait for the handle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class CopyHandle(ABC):
    """One copy under way. ``target`` holds the bytes once it is done."""

    target: Tensor

    @abstractmethod
    def done(self) -> bool:
        """Whether the copy has finished; never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Block this thread until the copy has finished; raises what the copy raised."""


class FinishedCopy(CopyHandle):
    """The handle of bytes that are already where they should be."""

    def __init__(self, target: Tensor) -> None:
        self.target = target

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class InFlight:
    """The copies of one lane that may still run, and the bytes that their sources hold.

    The backward pass can enqueue copies far ahead of the device. Each holds a
    gradient alive, so without a bound "gradients leave during backward" would
    save no device memory at all. ``admit`` blocks the enqueuing thread while
    more than ``limit_bytes`` would be under way (one copy always is admitted).
    Several threads enqueue: whoever calls holds the lane's lock.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self._copies: deque[tuple[CopyHandle, int]] = deque()
        self._bytes = 0

    def admit(self, source_bytes: int) -> None:
        while self._copies and (self._copies[0][0].done() or self._bytes + source_bytes > self.limit_bytes):
            self._retire()

    def add(self, handle: CopyHandle, source_bytes: int) -> None:
        self._copies.append((handle, source_bytes))
        self._bytes += source_bytes
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def drain(self) -> None:
        while self._copies:
            self._retire()

    def _retire(self) -> None:
        handle, held_bytes = self._copies[0]
        try:
            handle.wait()
        finally:
            # After Ctrl-C in the middle of waiting, the copy still runs, and still counts.
            if handle.done():
                self._copies.popleft()
                self._bytes -= held_bytes


class Transfer(ABC):
    """How bytes move between device and host.

    All tensors are flat and contiguous. ``staged`` says whether bytes move at
    all: where they do, the store keeps host buffers from :meth:`allocate`.
    """

    staged: bool

    @abstractmethod
    def allocate(self, num_bytes: int) -> Tensor:
        """Host memory that a copy engine may touch: uint8 ``[num_bytes]``, made at start-up only."""

    @abstractmethod
    def mark(self) -> Any:
        """This point of the current stream, to be given to :meth:`copy_to_host`, from any thread."""

    @abstractmethod
    def copy_to_host(self, source: Tensor, buffer: Tensor | None, ready: Any, after: CopyHandle | None) -> CopyHandle:
        """Copy a device tensor into ``buffer`` once ``ready`` is reached and ``after`` is done.

        Without staging, the handle's target is the source itself.
        """

    @abstractmethod
    def output_for(self, parameter: Tensor, buffer: Tensor | None) -> Tensor:
        """Where the kernel writes a parameter's new values: ``buffer``, or the parameter itself."""

    @abstractmethod
    def begin_publish(self) -> None:
        """Copies to the device from here on wait for what the current stream was given so far,
        which may still read the parameters."""

    @abstractmethod
    def copy_to_device(self, output: Tensor, parameter: Tensor) -> CopyHandle:
        """Copy the new values of a parameter back to it."""

    @abstractmethod
    def end_publish(self) -> None:
        """What the current stream is given from here on sees all copies to the device."""

    @abstractmethod
    def read(self, source: Tensor) -> Tensor:
        """A host copy of a device tensor, or the tensor itself where it is there; blocks."""

    def aside(self, ready: Any) -> AbstractContextManager[None]:
        """Device work of the enclosed block runs beside the current stream, once ``ready`` is reached;
        it is done when the block ends. For threads that wait anyway."""
        return nullcontext()

    def worker_delay(self) -> None:
        """Called at the start of each job of the host worker; the simulated transfer sleeps here."""
        return

    @abstractmethod
    def synchronize(self) -> None:
        """Block until every copy has finished."""

    @abstractmethod
    def close(self) -> None:
        """Let go of lanes and threads; no copy may be started afterwards."""


class UnstagedTransfer(Transfer):
    """State lives where the parameters are: kernels read the gradient where it is and write the parameter where it
    is, and nothing is copied but what was stepped ahead, while the parameter was still in use."""

    staged = False

    def copy_to_host(self, source: Tensor, buffer: Tensor | None, ready: Any, after: CopyHandle | None) -> CopyHandle:
        return FinishedCopy(source)

    def output_for(self, parameter: Tensor, buffer: Tensor | None) -> Tensor:
        return parameter

    def begin_publish(self) -> None:
        return

    def copy_to_device(self, output: Tensor, parameter: Tensor) -> CopyHandle:
        if output.data_ptr() != parameter.data_ptr():
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


class DirectTransfer(UnstagedTransfer):
    """CPU parameters: device and host are the same memory, and nothing is copied."""

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def mark(self) -> Any:
        return None

"""What every transfer offers: copies between device and host on two streams, and handles that own their buffers.

The handle of an asynchronous copy keeps the source and the target until the copy is done (law 9), whatever the caller
does with its own references. So a gradient can be let go of at once, and a buffer is reused only by a copy that was
told to wait for the handle.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor


class CopyHandle(ABC):
    """One copy under way. ``target`` has the bytes once it is done."""

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


class CopyStream(ABC):
    """Asynchronous copies in one direction, one after the other.

    The backward pass can enqueue copies far ahead of the device. Each keeps a gradient alive, so without a bound
    "gradients leave during backward" would save no device memory at all. :meth:`enqueue` blocks while the sources of
    the copies under way would take more than ``limit_bytes``; one copy is always admitted.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        # Autograd threads and the host worker both enqueue.
        self._lock = threading.Lock()
        self._copies: deque[tuple[CopyHandle, int]] = deque()
        self._bytes = 0

    def enqueue(self, source: Tensor, target: Tensor, ready: Any, after: CopyHandle | None) -> CopyHandle:
        """Copy ``source`` to ``target`` once ``ready`` is reached and ``after`` is done."""
        source_bytes = source.numel() * source.element_size()
        with self._lock:
            while self._copies and (self._copies[0][0].done() or self._bytes + source_bytes > self.limit_bytes):
                self._retire()
            handle = self._start(source, target, ready, after)
            self._copies.append((handle, source_bytes))
            self._bytes += source_bytes
            self.peak_bytes = max(self.peak_bytes, self._bytes)
        return handle

    @abstractmethod
    def _start(self, source: Tensor, target: Tensor, ready: Any, after: CopyHandle | None) -> CopyHandle:
        """Give the copy to the stream; the caller has the lock."""

    def drain(self) -> None:
        """Wait for every copy; raises what the first failed one raised."""
        with self._lock:
            while self._copies:
                self._retire()

    def _retire(self) -> None:
        handle, source_bytes = self._copies[0]
        try:
            handle.wait()
        finally:
            # After Ctrl-C in the middle of waiting, the copy still runs, and still counts.
            if handle.done():
                self._copies.popleft()
                self._bytes -= source_bytes


class Transfer(ABC):
    """How bytes move between device and host.

    All tensors are flat and contiguous. ``staged`` says whether bytes move at all: where they do, the store keeps host
    buffers from :meth:`allocate`.
    """

    staged: bool

    def allocate(self, num_bytes: int) -> Tensor:
        """Host memory that a copy engine may touch: uint8 ``[num_bytes]``, made at start-up only."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def mark(self) -> Any:
        """This point of the current stream, to be given to :meth:`copy_to_host`, from any thread."""
        return None

    @abstractmethod
    def copy_to_host(self, source: Tensor, buffer: Tensor | None, ready: Any, after: CopyHandle | None) -> CopyHandle:
        """Copy a device tensor into ``buffer`` once ``ready`` is reached and ``after`` is done.

        Without staging, the handle's target is the source itself.
        """

    @abstractmethod
    def output_for(self, parameter: Tensor, buffer: Tensor | None) -> Tensor:
        """Where the kernel writes a parameter's new values: ``buffer``, or the parameter itself."""

    def begin_publish(self) -> None:
        """Let copies to the device from here on wait for what the current stream was given so far, which may still
        read the parameters."""
        return

    @abstractmethod
    def copy_to_device(self, output: Tensor, parameter: Tensor) -> CopyHandle:
        """Copy the new values of a parameter back to it."""

    def end_publish(self) -> None:
        """Let what the current stream is given from here on see all copies to the device."""
        return

    @abstractmethod
    def read(self, source: Tensor) -> Tensor:
        """A host copy of a device tensor, or the tensor itself where it is there; blocks."""

    def aside(self, ready: Any) -> AbstractContextManager[None]:
        """Run device work of the enclosed block beside the current stream, once ``ready`` is reached; it is done when
        the block ends. For threads that wait anyway."""
        return nullcontext()

    def worker_delay(self) -> None:
        """Called at the start of each job of the host worker; the simulated transfer sleeps here."""
        return

    def synchronize(self) -> None:
        """Block until every copy has finished."""
        return

    def close(self) -> None:
        """Let go of streams and threads; no copy may be started afterwards."""
        return


Stream = TypeVar("Stream", bound=CopyStream)


class StagedTransfer(Transfer, Generic[Stream]):
    """State lives in host memory: gradients come on one stream, and new parameters leave on another."""

    staged = True

    def __init__(self, to_host: Stream, to_device: Stream) -> None:
        self.to_host = to_host
        self.to_device = to_device

    def copy_to_host(self, source: Tensor, buffer: Tensor | None, ready: Any, after: CopyHandle | None) -> CopyHandle:
        assert buffer is not None
        return self.to_host.enqueue(source, buffer, ready, after)

    def output_for(self, parameter: Tensor, buffer: Tensor | None) -> Tensor:
        assert buffer is not None
        return buffer

    def copy_to_device(self, output: Tensor, parameter: Tensor) -> CopyHandle:
        return self.to_device.enqueue(output, parameter, None, None)

    def end_publish(self) -> None:
        # Where the host is its own current stream, waiting in stream order is waiting.
        self.to_device.drain()

    def synchronize(self) -> None:
        self.to_host.drain()
        self.to_device.drain()


class UnstagedTransfer(Transfer):
    """State lives where the parameters are: kernels read the gradient and write the parameter in place, and nothing is
    copied but what was stepped ahead, while the parameter was still in use."""

    staged = False

    def copy_to_host(self, source: Tensor, buffer: Tensor | None, ready: Any, after: CopyHandle | None) -> CopyHandle:
        return FinishedCopy(source)

    def output_for(self, parameter: Tensor, buffer: Tensor | None) -> Tensor:
        return parameter

    def copy_to_device(self, output: Tensor, parameter: Tensor) -> CopyHandle:
        if output.data_ptr() != parameter.data_ptr():
            parameter.copy_(output)
        return FinishedCopy(parameter)

    def read(self, source: Tensor) -> Tensor:
        return source


class DirectTransfer(UnstagedTransfer):
    """CPU parameters: device and host are the same memory, and nothing is copied."""

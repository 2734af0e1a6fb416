"""Base classes of transfers: copies between device and host on two streams, and handles that own their buffers.

The handle of an asynchronous copy keeps the source and the target until the copy is done (law 9), whatever the caller
does with its own references. The caller can therefore drop a gradient at once, and a buffer is reused only by a copy
that waits for the handle.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from longshore.accelerator import DeviceClock
from longshore.transfer.private import allocate_private

_copy_each = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]  # one kernel for many small tensors


class Bundle:
    """Tensors of one dtype and device that are copied together.

    Args:
        parts: each tensor, flat, with its first element in the target. Elements between them have no meaning there.
    """

    def __init__(self, parts: Sequence[tuple[Tensor, int]]) -> None:
        self._tensors = [tensor for tensor, _ in parts]
        self._offsets = [offset for _, offset in parts]
        self.device = self._tensors[0].device
        self.nbytes = sum(tensor.nbytes for tensor in self._tensors)

    def gathered(self, numel: int) -> Tensor:
        """Return a copy of all of them in one tensor of ``numel`` elements."""
        like = self._tensors[0]
        whole = torch.empty(numel, dtype=like.dtype, device=like.device)
        places = zip(self._offsets, self._tensors, strict=True)
        _copy_each([whole[offset : offset + each.numel()] for offset, each in places], self._tensors)
        return whole

    def scatter(self, whole: Tensor) -> None:
        """Write the parts of ``whole`` to the tensors."""
        places = zip(self._offsets, self._tensors, strict=True)
        _copy_each(self._tensors, [whole[offset : offset + each.numel()] for offset, each in places])


def whole_of(source: Tensor | Bundle, target: Tensor | Bundle) -> Tensor:
    """Return which of them is in one piece: the target, if both are."""
    found = source if isinstance(target, Bundle) else target
    assert isinstance(found, Tensor)
    return found


def bytes_between(source: Tensor | Bundle, target: Tensor | Bundle) -> int:
    """Return how many bytes a copy moves, without those between the tensors of a bundle."""
    return source.nbytes if isinstance(source, Bundle) else target.nbytes


def copy_now(source: Tensor | Bundle, target: Tensor | Bundle) -> None:
    """Copy on the current stream. What passes through a tensor of its own there is one of that stream, whose later
    copies may have the memory at once."""
    if isinstance(target, Bundle):
        assert isinstance(source, Tensor)
        target.scatter(source.to(target.device, non_blocking=True, copy=True))
    else:
        target.copy_(source.gathered(target.numel()) if isinstance(source, Bundle) else source, non_blocking=True)


class CopyHandle(ABC):
    """Handle of one asynchronous copy.

    Attributes:
        target: has the bytes once the copy is done; of a copy to several tensors, the memory that is copied.
        num_bytes: how many it copies.
        order: how many copies its stream had begun before.
        timed: events of the device where the copy begins and ends, if the transfer times its copies.
    """

    target: Tensor
    num_bytes = 0
    order = 0
    timed: tuple[Any, Any] | None = None

    @abstractmethod
    def done(self) -> bool:
        """Return whether the copy has finished, without blocking."""

    @abstractmethod
    def wait(self) -> None:
        """Block this thread until the copy has finished; raise the copy's error if it failed."""


def wait_for_all(copies: Iterable[CopyHandle]) -> None:
    """Wait for copies of one stream. They run one after the other, so the host waits for the last one alone."""
    for copy in sorted(set(copies), key=lambda each: each.order, reverse=True):
        copy.wait()


class FinishedCopy(CopyHandle):
    """Handle for bytes that are already in the right place and need no copy."""

    def __init__(self, target: Tensor) -> None:
        self.target = target
        self.num_bytes = target.nbytes

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class CopyStream(ABC):
    """Stream of asynchronous copies in one direction, which run one after the other.

    The backward pass can enqueue copies far ahead of the device. Each copy keeps a gradient alive, so without a bound,
    copying gradients during backward would save no device memory. :meth:`enqueue` therefore blocks while the sources
    of unfinished copies would take more than ``limit_bytes``; a single copy is always admitted.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        # Autograd threads and the host worker both enqueue.
        self._lock = threading.Lock()
        self._copies: deque[tuple[CopyHandle, int]] = deque()
        self._bytes = 0
        self._begun = 0

    def enqueue(
        self, source: Tensor | Bundle, target: Tensor | Bundle, ready: Sequence[Any], after: CopyHandle | None
    ) -> CopyHandle:
        """Copy ``source`` to ``target`` once each of ``ready`` (see :meth:`Transfer.mark`) is reached, and ``after``
        is done."""
        source_bytes = source.nbytes
        with self._lock:
            while self._copies and (self._copies[0][0].done() or self._bytes + source_bytes > self.limit_bytes):
                self._retire()
            handle = self._start(source, target, ready, after)
            handle.order, self._begun = self._begun, self._begun + 1
            self._copies.append((handle, source_bytes))
            self._bytes += source_bytes
            self.peak_bytes = max(self.peak_bytes, self._bytes)
        return handle

    @abstractmethod
    def _start(
        self, source: Tensor | Bundle, target: Tensor | Bundle, ready: Sequence[Any], after: CopyHandle | None
    ) -> CopyHandle:
        """Start the copy on the stream; the caller has acquired the lock."""

    def forget_finished(self) -> None:
        """Free the sources of copies that have finished, as :meth:`enqueue` does; this does not wait."""
        with self._lock:
            while self._copies and self._copies[0][0].done():
                self._retire()

    def drain(self) -> None:
        """Wait for every copy; raise the error of the first copy that failed."""
        with self._lock:
            while self._copies:
                self._retire()

    def _retire(self) -> None:
        handle, source_bytes = self._copies[0]
        try:
            handle.wait()
        finally:
            # If Ctrl-C interrupted the wait, the copy still runs, and its bytes still count.
            if handle.done():
                self._copies.popleft()
                self._bytes -= source_bytes


class Transfer(ABC):
    """Copies of gradients from device to host, and of new parameters from host to device.

    All tensors are flat and contiguous. ``staged`` says whether gradients are copied: if so, the store keeps host
    buffers from :meth:`allocate`.
    """

    staged: bool
    device = torch.device("cpu")
    """Where the parameters compute."""

    @property
    def publishes(self) -> bool:
        """Whether new parameters are copied; if not, kernels write them in place."""
        return self.staged

    def allocate(self, num_bytes: int) -> Tensor:
        """Allocate host memory that a copy engine can access: uint8 ``[num_bytes]``. Called at start-up only."""
        return allocate_private(num_bytes)

    def mark(self) -> Any:
        """Return the current position of the current stream; any thread may pass it to :meth:`copy_to_host`."""
        return None

    @abstractmethod
    def copy_to_host(self, source: Tensor, buffer: Tensor | None, ready: Any, after: CopyHandle | None) -> CopyHandle:
        """Copy a device tensor into ``buffer`` once ``ready`` is reached and ``after`` is done.

        Without staging, the handle's target is the source itself.
        """

    @property
    def most_together(self) -> int:
        """How many bytes may wait in device memory to be copied together."""
        return 0

    def copy_together(
        self, bundle: Bundle, buffer: Tensor, ready: Sequence[Any], after: CopyHandle | None
    ) -> CopyHandle:
        """Copy several device tensors into ``buffer`` at once; only with staging. See :meth:`copy_to_host`."""
        raise NotImplementedError

    @abstractmethod
    def output_for(self, parameter: Tensor, buffer: Tensor | None) -> Tensor:
        """Return the tensor to which the kernel writes new values: ``buffer``, or the parameter itself."""

    def begin_publish(self) -> None:
        """Make all later copies to the device wait for the work already enqueued on the current stream, which may still
        read the parameters."""
        return

    @abstractmethod
    def copy_to_device(self, output: Tensor, parameter: Tensor) -> CopyHandle:
        """Copy the new values of a parameter back to it."""

    def copy_apart(self, outputs: Tensor, parameters: Bundle) -> CopyHandle:
        """Copy new values of several parameters back to them at once; only with staging."""
        raise NotImplementedError

    def end_publish(self) -> None:
        """Make all later work of the current stream wait for the copies to the device."""
        return

    @abstractmethod
    def read(self, source: Tensor) -> Tensor:
        """Return a host copy of a device tensor, or the tensor itself if nothing is staged; blocks."""

    def stream(self) -> Any:
        """Return the current stream, for :meth:`marks`."""
        return None

    def marks(self, streams: Iterable[Any]) -> Any:
        """Return the current positions of these streams and of the current one; any thread may pass them to
        :meth:`aside`."""
        return None

    def aside(self, ready: Any) -> AbstractContextManager[None]:
        """Run device work of the enclosed block on another stream than the current one, once all of ``ready`` (see
        :meth:`marks`) are reached. The work is done when the block ends, so this is for threads that wait anyway."""
        return nullcontext()

    def read_aside(self, source: Tensor) -> None:
        """Note that a block of :meth:`aside` reads ``source``, of which the caller may drop the last reference now."""
        return

    def clock(self) -> DeviceClock | None:
        """Return a clock for the streams of the parameters' device; None where the host does all work itself."""
        return None

    def time_copies(self, timed: bool) -> None:
        """Give later copies a pair of events with times, or no longer."""
        return

    def begin_job(self) -> None:
        """Prepare the thread of the host worker for its next job, which calls this method first."""
        return

    def synchronize(self) -> None:
        """Block until every copy has finished."""
        return

    def close(self) -> None:
        """Release streams and threads; no copy may be started afterwards."""
        return


Stream = TypeVar("Stream", bound=CopyStream)


class StagedTransfer(Transfer, Generic[Stream]):
    """Transfer for state in host memory: gradients are copied on one stream, and new parameters on another."""

    staged = True

    def __init__(self, to_host: Stream, to_device: Stream) -> None:
        self.to_host = to_host
        self.to_device = to_device

    def copy_to_host(self, source: Tensor, buffer: Tensor | None, ready: Any, after: CopyHandle | None) -> CopyHandle:
        assert buffer is not None
        return self.to_host.enqueue(source, buffer, [] if ready is None else [ready], after)

    @property
    def most_together(self) -> int:
        return self.to_host.limit_bytes // 2  # while these wait, others may be on their way

    def copy_together(
        self, bundle: Bundle, buffer: Tensor, ready: Sequence[Any], after: CopyHandle | None
    ) -> CopyHandle:
        return self.to_host.enqueue(bundle, buffer, ready, after)

    def output_for(self, parameter: Tensor, buffer: Tensor | None) -> Tensor:
        assert buffer is not None
        return buffer

    def copy_to_device(self, output: Tensor, parameter: Tensor) -> CopyHandle:
        return self.to_device.enqueue(output, parameter, [], None)

    def copy_apart(self, outputs: Tensor, parameters: Bundle) -> CopyHandle:
        return self.to_device.enqueue(outputs, parameters, [], None)

    def end_publish(self) -> None:
        # There is no device stream that could wait for the copies, so the host waits.
        self.to_device.drain()

    def synchronize(self) -> None:
        self.to_host.drain()
        self.to_device.drain()


def put_in_place(output: Tensor, parameter: Tensor) -> CopyHandle:
    """Write new values to a parameter in the same memory, unless they are there already."""
    if output.data_ptr() != parameter.data_ptr():
        parameter.copy_(output)
    return FinishedCopy(parameter)


class UnstagedTransfer(Transfer):
    """Transfer for state in the memory of the parameters: kernels read the gradient and write the parameter in place.
    Only the results of stepping ahead are copied, because the parameter was still in use when they were computed."""

    staged = False

    def copy_to_host(self, source: Tensor, buffer: Tensor | None, ready: Any, after: CopyHandle | None) -> CopyHandle:
        return FinishedCopy(source)

    def output_for(self, parameter: Tensor, buffer: Tensor | None) -> Tensor:
        return parameter

    def copy_to_device(self, output: Tensor, parameter: Tensor) -> CopyHandle:
        return put_in_place(output, parameter)

    def read(self, source: Tensor) -> Tensor:
        return source


class DirectTransfer(UnstagedTransfer):
    """Transfer for CPU parameters: device and host are the same memory, and nothing is copied."""

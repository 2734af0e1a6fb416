"""Base classes of copies: the handle ``Copy``, ``CopyStream`` in one direction, and ``CopyStreams``, the two of a
memory in which state rests.

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
from typing import Any

import torch
from torch import Tensor

from longshore.accelerator import DeviceClock, Mark
from longshore.transfer.host_memory import allocate_private

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


class Copy(ABC):
    """Handle of one asynchronous copy.

    Attributes:
        target: has the bytes once the copy is done; of a copy to several tensors, the memory that is copied.
        num_bytes: how many it copies.
        order: how many copies its stream had begun before.
        timed: events of the device where the copy begins and ends, if its stream times them.
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


def wait_for_all(copies: Iterable[Copy]) -> None:
    """Wait for copies of one stream. They run one after the other, so the host waits for the last one alone."""
    for copy in sorted(set(copies), key=lambda each: each.order, reverse=True):
        copy.wait()


class FinishedCopy(Copy):
    """Handle for bytes that are already in the right place and need no copy."""

    def __init__(self, target: Tensor) -> None:
        self.target = target
        self.num_bytes = target.nbytes

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


def put_in_place(output: Tensor, parameter: Tensor) -> Copy:
    """Write new values to a parameter in the same memory, unless they are there already."""
    if output.data_ptr() != parameter.data_ptr():
        parameter.copy_(output)
    return FinishedCopy(parameter)


_CPU = torch.device("cpu")


class CopyStream(ABC):
    """Asynchronous copies in one direction, which run one after the other.

    The backward pass can request copies far ahead of the device. Each keeps a gradient alive, so without a bound,
    copying gradients during backward would save no device memory: :meth:`copy` waits while the sources of unfinished
    copies would take more than ``limit_bytes``. A single copy is always admitted. Any thread may call.

    Attributes:
        limit_bytes: how many bytes may be on their way.
        peak_bytes: how many were, at most.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        # Autograd threads and the host worker both request copies.
        self._lock = threading.Lock()
        self._copies: deque[tuple[Copy, int]] = deque()
        self._bytes = 0
        self._begun = 0

    def copy(
        self,
        source: Tensor | Bundle,
        target: Tensor | Bundle,
        ready: Sequence[Mark] = (),
        after: Copy | None = None,
    ) -> Copy:
        """Copy ``source`` to ``target`` once each of ``ready`` (see :meth:`CopyStreams.mark`) is reached, and ``after``
        is done; first wait until the copy fits. Raises the error of a former copy that failed."""
        num_bytes = source.nbytes
        with self._lock:
            while self._copies and (self._copies[0][0].done() or self._bytes + num_bytes > self.limit_bytes):
                self._retire()
            handle = self._start(source, target, ready, after)
            handle.order, self._begun = self._begun, self._begun + 1
            self._copies.append((handle, num_bytes))
            self._bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._bytes)
        return handle

    @abstractmethod
    def _start(
        self, source: Tensor | Bundle, target: Tensor | Bundle, ready: Sequence[Mark], after: Copy | None
    ) -> Copy:
        """Start the copy on the stream; the caller has acquired the lock."""

    @abstractmethod
    def after_current(self) -> None:
        """Make all later copies wait for the work already enqueued on the current stream."""

    @abstractmethod
    def before_current(self) -> None:
        """Make all later work of the current stream wait for the copies so far."""

    def forget_finished(self) -> None:
        """Free the sources of copies that have finished, as :meth:`copy` does; this does not wait."""
        with self._lock:
            while self._copies and self._copies[0][0].done():
                self._retire()

    def drain(self) -> None:
        """Wait for every copy; raise the error of the first copy that failed."""
        with self._lock:
            while self._copies:
                self._retire()

    def close(self) -> None:
        """Wait for every copy; none may be requested afterwards."""
        self.drain()

    def _retire(self) -> None:
        handle, source_bytes = self._copies[0]
        try:
            handle.wait()
        finally:
            # If Ctrl-C interrupted the wait, the copy still runs, and its bytes still count.
            if handle.done():
                self._copies.popleft()
                self._bytes -= source_bytes


class CopyStreams:
    """The copies between a memory in which state rests and the device where its parameters compute.

    All tensors are flat and contiguous. This class has what parameters in host memory need; without streams it is for
    state in the memory of CPU parameters, and nothing is copied.

    Args:
        device: where the parameters compute.
        down: copies gradients. None: kernels read them where they are.
        up: copies new parameters. None: kernels write them in place, but for the results of stepping ahead, since the
            parameter was still in use when these were computed.
    """

    def __init__(
        self,
        device: torch.device = _CPU,
        down: CopyStream | None = None,
        up: CopyStream | None = None,
    ) -> None:
        self.device = device
        self.down = down
        self.up = up

    @property
    def staged(self) -> bool:
        """Whether gradients are copied: the store has buffers from :meth:`allocate` for them."""
        return self.down is not None

    @property
    def publishes(self) -> bool:
        """Whether new parameters are copied."""
        return self.up is not None

    def allocate(self, num_bytes: int) -> Tensor:
        """Allocate memory that copies go to and come from: uint8 ``[num_bytes]``. Called at start-up only."""
        return allocate_private(num_bytes)

    def mark(self) -> Sequence[Mark]:
        """Return the current position of the current stream; any thread may pass it to :meth:`stage`."""
        return ()

    @property
    def most_together(self) -> int:
        """How many bytes of gradients may wait in device memory to be copied together."""
        return 0 if self.down is None else self.down.limit_bytes // 2  # while these wait, others may be on their way

    def stage(self, source: Tensor | Bundle, buffer: Tensor | None, ready: Sequence[Mark], after: Copy | None) -> Copy:
        """Copy gradients into ``buffer`` once each of ``ready`` is reached and ``after`` is done; may wait for other
        copies. Where nothing is staged, the handle's target is the gradient itself."""
        if self.down is None:
            assert isinstance(source, Tensor)
            return FinishedCopy(source)
        assert buffer is not None
        return self.down.copy(source, buffer, ready, after)

    def output_for(self, parameter: Tensor, buffer: Tensor | None) -> Tensor:
        """Return the tensor to which the kernel writes new values: ``buffer``, or the parameter itself."""
        if self.up is None:
            return parameter
        assert buffer is not None
        return buffer

    def begin_publish(self) -> None:
        """Make all later copies of new parameters wait for the work already enqueued on the current stream, which may
        still read the former ones."""
        if self.up is not None:
            self.up.after_current()

    def publish(self, output: Tensor, parameters: Tensor | Bundle) -> Copy:
        """Copy new values back to a parameter, or to several, if new parameters are copied."""
        if self.up is None:
            assert isinstance(parameters, Tensor)
            return put_in_place(output, parameters)
        return self.up.copy(output, parameters)

    def end_publish(self) -> None:
        """Make all later work of the current stream see the new parameters."""
        if self.up is not None:
            self.up.before_current()

    def read(self, source: Tensor) -> Tensor:
        """Return a host copy of a parameter's tensor, or the tensor itself if nothing is staged; blocks."""
        return source.clone() if self.staged else source

    def stream(self) -> Any:
        """Return the current stream, for :meth:`marks`."""
        return None

    def marks(self, streams: Iterable[Any]) -> Sequence[Mark]:
        """Return the current positions of these streams and of the current one; any thread may pass them to
        :meth:`aside`."""
        return ()

    def follow(self, ready: Sequence[Mark], values: Tensor) -> None:
        """Let the current stream wait for ``ready``, since it is about to use ``values`` of another stream."""
        return

    def aside(self, ready: Sequence[Mark]) -> AbstractContextManager[None]:
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
        for stream in (self.down, self.up):
            if stream is not None:
                stream.drain()

    def close(self) -> None:
        """Release streams and threads; no copy may be started afterwards."""
        for stream in (self.down, self.up):
            if stream is not None:
                stream.close()

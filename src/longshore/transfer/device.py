"""Copy streams of an accelerator: with events and pinned memory, or without copies for state that stays on it.

They use the part of ``torch.accelerator`` that every type of device has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from longshore.accelerator import DeviceClock, current_stream_is, make_current, new_stream, timed_event, wait_for
from longshore.transfer.copy_stream import (
    Bundle,
    Copy,
    CopyStream,
    CopyStreams,
    bytes_between,
    copy_now,
    whole_of,
)
from longshore.transfer.host_memory import allocate_pinned


class DeviceHandle(Copy):
    """Handle of a copy on a stream of the device, which ends at ``event``. It keeps no tensor."""

    def __init__(self, event: torch.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        wait_for(self.event)


class DeviceCopy(DeviceHandle):
    """Handle of a copy that keeps both sides until it is over."""

    def __init__(
        self, source: Tensor | Bundle, target: Tensor | Bundle, event: torch.Event, stream: torch.Stream
    ) -> None:
        super().__init__(event)
        self.target = whole_of(source, target)
        self.num_bytes = bytes_between(source, target)
        self._stream = stream
        self._kept: tuple[Tensor | Bundle, Tensor | Bundle] | None = source, target
        self._done = False

    def done(self) -> bool:
        if not self._done and self.event.query():
            self._done, self._kept = True, None
        return self._done

    def wait(self) -> None:
        if not self.done():
            super().wait()
            self._done, self._kept = True, None

    def let_go(self) -> None:
        """Leave the source to torch, which frees its memory once the copy is over. The caller keeps the target."""
        kept = self._kept  # which another thread may set to None meanwhile
        if not self.done() and kept is not None and isinstance(kept[0], Tensor):
            kept[0].record_stream(self._stream)
            self._kept = None


class DeviceFetch(DeviceHandle):
    """Handle of a copy to the device, for a later :meth:`take`.

    It keeps both tensors until then. Afterwards everything that uses or frees the one on the device follows the copy.
    If it is never taken, the allocator waits for the copy before it hands out the memory again.

    Args:
        source, target: tensors of the copy.
        whole: tensor that ``target`` is a part of.
        event: the end of the copy.
        home: stream on which ``whole`` was allocated.
        stream: stream of the copy.
    """

    def __init__(
        self,
        source: Tensor,
        target: Tensor,
        whole: Tensor,
        event: torch.Event,
        home: torch.Stream,
        stream: torch.Stream,
    ) -> None:
        super().__init__(event)
        self.num_bytes = target.nbytes
        self._kept: tuple[Tensor, Tensor, Tensor] | None = source, target, whole
        self._home = home
        self._stream: torch.Stream | None = stream
        """The stream of the copy, as long as no other one waits for it."""

    def __del__(self) -> None:
        if self._stream is not None and self._kept is not None and not self.event.query():
            self._kept[2].record_stream(self._stream)

    def end(self) -> Copy:
        """Return a handle of the copy's end, which keeps no tensor."""
        return DeviceHandle(self.event)

    def reach(self) -> Tensor:
        """Return the tensor; later work of the current stream waits for the copy, and the host goes on."""
        assert self._kept is not None
        _, _, whole = self._kept
        stream = torch.accelerator.current_stream(whole.device)
        stream.wait_event(self.event)
        self._stream = None
        if stream != self._home:  # which the allocator takes for the one that uses it
            whole.record_stream(stream)
        return whole

    def take(self) -> Tensor:
        """As :meth:`reach`, for the last time: the handle does not keep the tensor any longer."""
        whole, self._kept = self.reach(), None
        return whole


def _around(
    stream: torch.Stream, timed: bool, copy: Callable[[], object]
) -> tuple[torch.Event, tuple[torch.Event, torch.Event] | None]:
    """Enqueue a copy on a stream, which is current; return the event behind it and, if it is timed, both around it."""
    if not timed:
        copy()
        return stream.record_event(), None
    begun = timed_event(stream)
    copy()
    ended = timed_event(stream)
    return ended, (begun, ended)


class DeviceCopyStream(CopyStream):
    """A stream of the device for copies in one direction.

    Args:
        device: the accelerator.
        limit_bytes: as in :class:`CopyStream`. Copies to the device read memory that lives long, and need no limit.
    """

    def __init__(self, device: torch.device, limit_bytes: int = 1 << 62) -> None:
        super().__init__(limit_bytes)
        self.stream = new_stream(device)
        self.times_copies = False

    def mark(self) -> Sequence[torch.Event]:
        """Return the current position of the current stream, for :meth:`copy`."""
        return [self._current().record_event()]

    def _current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.stream.device)

    def _start(
        self, source: Tensor | Bundle, target: Tensor | Bundle, ready: Sequence[torch.Event], after: Copy | None
    ) -> Copy:
        with current_stream_is(self.stream), torch.no_grad():
            # Only the device waits for these events; the host goes on at once.
            for mark in ready:
                self.stream.wait_event(mark)
            if isinstance(after, DeviceHandle):
                self.stream.wait_event(after.event)
            event, timed = _around(self.stream, self.times_copies, lambda: copy_now(source, target))
        # The handle keeps all tensors, so the caching allocator cannot reuse their memory while the copy runs, and no
        # record_stream is needed.
        copy = DeviceCopy(source, target, event, self.stream)
        copy.timed = timed
        return copy

    def fetch(self, source: Tensor, target: Tensor, whole: Tensor, after: Copy | None = None) -> DeviceFetch:
        """Copy ``source``, in pinned memory, to ``target``, a part of ``whole``, once ``after`` is done; nothing limits
        these copies. The current stream is the one on which ``whole`` was allocated."""
        home = self._current()
        # Work that is enqueued on the current stream may still use what was in this memory before.
        self.stream.wait_event(home.record_event())
        if isinstance(after, DeviceHandle):
            self.stream.wait_event(after.event)
        with current_stream_is(self.stream), torch.no_grad():
            event, timed = _around(self.stream, self.times_copies, lambda: target.copy_(source, non_blocking=True))
        fetch = DeviceFetch(source, target, whole, event, home, self.stream)
        fetch.timed = timed
        return fetch

    def after_current(self) -> None:
        self.stream.wait_stream(self._current())

    def before_current(self) -> None:
        self._current().wait_stream(self.stream)


class DeviceStreams(CopyStreams):
    """Copy streams for parameters that compute on an accelerator: with events, pinned memory, and a stream for work
    beside the current one. Without ``down`` and ``up`` state stays on the device; kernels run on the current stream.

    Args:
        device: where the parameters compute.
        down: copies gradients to the host.
        up: copies new parameters to the device. None, with ``down``: the parameters rest on the host, too.
    """

    def __init__(
        self, device: torch.device, down: DeviceCopyStream | None = None, up: DeviceCopyStream | None = None
    ) -> None:
        self.down: DeviceCopyStream | None
        self.up: DeviceCopyStream | None
        super().__init__(device, down, up)
        self._beside = new_stream(device)

    @classmethod
    def to_host(cls, device: torch.device, in_flight_bytes: int = 1 << 28, publishes: bool = True) -> DeviceStreams:
        """Return those for state in host memory.

        Args:
            device: where gradients come.
            in_flight_bytes: how many bytes of gradients may be on their way to the host before the thread that brings
                them waits.
            publishes: whether the parameters are on the device; otherwise they rest on the host, and kernels write
                them in place.
        """
        # Copies to the device read pinned slots that the store owns. They keep no device memory alive, so they need no
        # limit, and the host never has to wait.
        return cls(device, DeviceCopyStream(device, in_flight_bytes), DeviceCopyStream(device) if publishes else None)

    def __reduce__(self) -> Any:
        if self.down is None:
            return DeviceStreams, (self.device,)
        return DeviceStreams.to_host, (self.device, self.down.limit_bytes, self.publishes)

    def allocate(self, num_bytes: int) -> Tensor:
        if self.staged:
            return allocate_pinned(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def begin_publish(self) -> None:
        if self.staged and not self.publishes:
            # Copies of the parameters to the device may still be under way, also of some that nothing has used.
            wait_for(self.stream().record_event())
            torch.accelerator.synchronize(self.device)
        super().begin_publish()

    def read(self, source: Tensor) -> Tensor:
        return source.cpu() if self.staged else source

    def clock(self) -> DeviceClock:
        return DeviceClock(self.device)

    def time_copies(self, timed: bool) -> None:
        for stream in (self.down, self.up):
            if stream is not None:
                stream.times_copies = timed

    def begin_job(self) -> None:
        make_current(self.device)

    def mark(self) -> Sequence[torch.Event]:
        return [self.stream().record_event()]

    def stream(self) -> Any:
        return torch.accelerator.current_stream(self.device)

    def marks(self, streams: Iterable[Any]) -> Sequence[torch.Event]:
        return [each.record_event() for each in {self.stream(), *streams}]

    def follow(self, ready: Sequence[torch.Event], values: Tensor) -> None:
        stream = self.stream()
        for each in ready:
            stream.wait_event(each)
        values.record_stream(stream)

    @contextlib.contextmanager
    def aside(self, ready: Sequence[torch.Event]) -> Iterator[None]:
        with current_stream_is(self._beside):
            for each in ready:
                self._beside.wait_event(each)
            try:
                yield
            finally:
                # Afterwards the caller may free what the block read, and every stream sees what it wrote.
                wait_for(self._beside.record_event())

    def read_aside(self, source: Tensor) -> None:
        # The stream that it was allocated on may use the memory again, but only once it has been read.
        source.record_stream(self._beside)

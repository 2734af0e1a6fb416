"""Transfers for an accelerator: with streams, events and pinned memory, or without copies for state that stays on it.

They use what ``torch.accelerator`` has for every type of device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from longshore.accelerator import DeviceClock, current_stream_is, make_current, new_stream, timed_event, wait_for
from longshore.transfer.base import (
    Bundle,
    CopyHandle,
    CopyStream,
    StagedTransfer,
    Transfer,
    UnstagedTransfer,
    bytes_between,
    copy_now,
    put_in_place,
    whole_of,
)
from longshore.transfer.pinned import allocate_pinned


class DeviceCopy(CopyHandle):
    def __init__(self, source: Tensor | Bundle, target: Tensor | Bundle, event: torch.Event) -> None:
        self.target = whole_of(source, target)
        self.num_bytes = bytes_between(source, target)
        self.event = event
        self._kept: object = source, target

    def done(self) -> bool:
        if self._kept is not None and self.event.query():
            self._kept = None
        return self._kept is None

    def wait(self) -> None:
        if not self.done():
            wait_for(self.event)
            self._kept = None


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
    """A stream of the device for copies in one direction."""

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self.stream = new_stream(device)
        self.times_copies = False

    def mark_current(self) -> torch.Event:
        """Return the current position of the current stream, for :meth:`enqueue`."""
        return torch.accelerator.current_stream(self.stream.device).record_event()

    def _start(
        self, source: Tensor | Bundle, target: Tensor | Bundle, ready: Sequence[Any], after: CopyHandle | None
    ) -> CopyHandle:
        with current_stream_is(self.stream), torch.no_grad():
            # Only the device waits for these events; the host goes on at once.
            for mark in ready:
                self.stream.wait_event(mark)
            if isinstance(after, DeviceCopy):
                self.stream.wait_event(after.event)
            event, timed = _around(self.stream, self.times_copies, lambda: copy_now(source, target))
        # The handle keeps all tensors, so the caching allocator cannot reuse their memory while the copy runs, and no
        # record_stream is needed.
        copy = DeviceCopy(source, target, event)
        copy.timed = timed
        return copy


class DeviceFetch(CopyHandle):
    """Handle of a copy to the device that somebody will :meth:`take`.

    It keeps both tensors until then. Afterwards everything that uses or frees the one on the device follows the copy.
    If nobody asks for it, the allocator waits for the copy before it hands out the memory again.

    Args:
        source, target: what is copied, and where.
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
        self.num_bytes = target.nbytes
        self.event = event
        self._kept: tuple[Tensor, Tensor, Tensor] | None = source, target, whole
        self._home = home
        self._stream: torch.Stream | None = stream
        """The stream of the copy, as long as no other one waits for it."""

    def __del__(self) -> None:
        if self._stream is not None and self._kept is not None and not self.event.query():
            self._kept[2].record_stream(self._stream)

    def done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        wait_for(self.event)

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


class DeviceFetchStream:
    """A stream of the device for copies from pinned memory that somebody will take; nothing limits them."""

    def __init__(self, device: torch.device) -> None:
        self.stream = new_stream(device)
        self.times_copies = False

    def begin(self, source: Tensor, target: Tensor, whole: Tensor, after: CopyHandle | None = None) -> DeviceFetch:
        """Copy ``source`` to ``target``, a part of ``whole``, once ``after`` is done. The current stream is the one on
        which they were allocated."""
        home = torch.accelerator.current_stream(self.stream.device)
        # Work that is enqueued on the current stream may still use what was in this memory before.
        self.stream.wait_event(home.record_event())
        if isinstance(after, DeviceCopy | DeviceFetch):
            self.stream.wait_event(after.event)
        with current_stream_is(self.stream), torch.no_grad():
            event, timed = _around(self.stream, self.times_copies, lambda: target.copy_(source, non_blocking=True))
        fetch = DeviceFetch(source, target, whole, event, home, self.stream)
        fetch.timed = timed
        return fetch


class _BesideCurrent(Transfer):
    """What a transfer has a stream for that is beside the current one of ``device``."""

    def __init__(self, device: torch.device, *args: Any) -> None:
        super().__init__(*args)
        self.device = device
        self._beside = new_stream(device)

    def clock(self) -> DeviceClock:
        return DeviceClock(self.device)

    def begin_job(self) -> None:
        make_current(self.device)

    def mark(self) -> Any:
        return self.stream().record_event()

    def stream(self) -> Any:
        return torch.accelerator.current_stream(self.device)

    def marks(self, streams: Iterable[Any]) -> Any:
        return [each.record_event() for each in {self.stream(), *streams}]

    @contextlib.contextmanager
    def aside(self, ready: Any) -> Iterator[None]:
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


class DeviceTransfer(_BesideCurrent, StagedTransfer[DeviceCopyStream]):
    """Transfer for the parameters of one accelerator, with one stream for each direction, events and pinned memory.

    Args:
        device: where the parameters are.
        in_flight_bytes: how many bytes of gradients may be on their way to the host before the thread that enqueues
            them waits.
    """

    def __init__(self, device: torch.device, in_flight_bytes: int = 1 << 28) -> None:
        # Copies to the device read pinned slots that the store owns. They keep no device memory alive, so they need no
        # limit, and the host never has to wait.
        super().__init__(device, DeviceCopyStream(device, in_flight_bytes), DeviceCopyStream(device, 1 << 62))

    def __reduce__(self) -> Any:
        return DeviceTransfer, (self.device, self.to_host.limit_bytes)

    def allocate(self, num_bytes: int) -> Tensor:
        return allocate_pinned(num_bytes)

    def time_copies(self, timed: bool) -> None:
        self.to_host.times_copies = self.to_device.times_copies = timed

    def begin_publish(self) -> None:
        self.to_device.stream.wait_stream(self.stream())

    def end_publish(self) -> None:
        self.stream().wait_stream(self.to_device.stream)

    def read(self, source: Tensor) -> Tensor:
        return source.cpu()

    def close(self) -> None:
        self.synchronize()


class RestingTransfer(DeviceTransfer):
    """Transfer for parameters that rest on the host, and whose gradients come on an accelerator: kernels write the
    parameters in place, and nothing is published.

    Args:
        device: where the gradients come.
        in_flight_bytes: as in :class:`DeviceTransfer`.
    """

    @property
    def publishes(self) -> bool:
        return False

    def __reduce__(self) -> Any:
        return RestingTransfer, (self.device, self.to_host.limit_bytes)

    def output_for(self, parameter: Tensor, buffer: Tensor | None) -> Tensor:
        return parameter

    def begin_publish(self) -> None:
        # Copies of the parameters to the device may still be under way, also of some that nothing has used.
        wait_for(self.mark())
        torch.accelerator.synchronize(self.device)

    def copy_to_device(self, output: Tensor, parameter: Tensor) -> CopyHandle:
        return put_in_place(output, parameter)

    def end_publish(self) -> None:
        return


class ResidentTransfer(_BesideCurrent, UnstagedTransfer):
    """Transfer for state that stays on the parameters' device: kernels run on the current stream.

    Args:
        device: where the parameters and their state are.
    """

    def __reduce__(self) -> Any:
        return ResidentTransfer, (self.device,)

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

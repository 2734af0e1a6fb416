"""CUDA: one stream for each direction, events, pinned slabs made at start-up; or nothing to copy at all."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from longshore.transfer.base import CopyHandle, InFlight, Transfer, UnstagedTransfer


class CudaCopy(CopyHandle):
    def __init__(self, source: Tensor, target: Tensor, event: torch.cuda.Event) -> None:
        self.target = target
        self.event = event
        self._source: Tensor | None = source

    def done(self) -> bool:
        if self._source is None:
            return True
        if self.event.query():
            self._source = None
            return True
        return False

    def wait(self) -> None:
        self.event.synchronize()
        self._source = None


class CudaLane:
    """A stream of its own for copies in one direction."""

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        self.stream = torch.cuda.Stream(device)
        # Autograd threads and the host worker both enqueue.
        self._lock = threading.Lock()
        self.in_flight = InFlight(limit_bytes)

    def enqueue(
        self, source: Tensor, target: Tensor, ready: torch.cuda.Event | None, after: CopyHandle | None
    ) -> CudaCopy:
        source_bytes = source.numel() * source.element_size()
        with self._lock:
            self.in_flight.admit(source_bytes)
            with torch.cuda.stream(self.stream), torch.no_grad():
                # Both are waits on the device: the host goes on at once.
                if ready is not None:
                    self.stream.wait_event(ready)
                if isinstance(after, CudaCopy):
                    self.stream.wait_event(after.event)
                target.copy_(source, non_blocking=True)
                event = torch.cuda.Event()
                event.record(self.stream)
            # The handle keeps both tensors, so the caching allocator cannot hand
            # their memory out while the copy runs, and needs no record_stream.
            handle = CudaCopy(source, target, event)
            self.in_flight.add(handle, source_bytes)
        return handle

    def drain(self) -> None:
        with self._lock:
            self.in_flight.drain()


class CudaAside:
    """A stream beside the current one, for threads that wait anyway; see :meth:`Transfer.aside`."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    @contextlib.contextmanager
    def after(self, ready: torch.cuda.Event) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            yield
            # What the block read may be let go of, and what it wrote is there for every stream.
            self._stream.synchronize()


def _mark(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class CudaTransfer(Transfer):
    """Real streams, events and pinned memory, for the parameters of one device.

    Args:
        device: where the parameters are.
        in_flight_bytes: how many bytes of gradients may be on their way to the
            host before the thread that enqueues them waits.
    """

    staged = True

    def __init__(self, device: torch.device, in_flight_bytes: int = 1 << 28) -> None:
        self.device = device
        self.to_host = CudaLane(device, in_flight_bytes)
        # Sources of copies up are pinned slots that the store owns: no device
        # memory hangs on them, and the host never has to wait.
        self.to_device = CudaLane(device, 1 << 62)
        self._aside = CudaAside(device)

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def mark(self) -> Any:
        return _mark(self.device)

    def copy_to_host(self, source: Tensor, buffer: Tensor | None, ready: Any, after: CopyHandle | None) -> CopyHandle:
        assert buffer is not None
        return self.to_host.enqueue(source, buffer, ready, after)

    def output_for(self, parameter: Tensor, buffer: Tensor | None) -> Tensor:
        assert buffer is not None
        return buffer

    def begin_publish(self) -> None:
        self.to_device.stream.wait_stream(torch.cuda.current_stream(self.device))

    def copy_to_device(self, output: Tensor, parameter: Tensor) -> CopyHandle:
        return self.to_device.enqueue(output, parameter, None, None)

    def end_publish(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.to_device.stream)

    def read(self, source: Tensor) -> Tensor:
        return source.cpu()

    def aside(self, ready: Any) -> contextlib.AbstractContextManager[None]:
        return self._aside.after(ready)

    def synchronize(self) -> None:
        self.to_host.drain()
        self.to_device.drain()

    def close(self) -> None:
        self.synchronize()


class CudaResidentTransfer(UnstagedTransfer):
    """State that stays on the parameters' device: kernels follow the current stream.

    Args:
        device: where the parameters and their state are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._aside = CudaAside(device)

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def mark(self) -> Any:
        return _mark(self.device)

    def aside(self, ready: Any) -> contextlib.AbstractContextManager[None]:
        return self._aside.after(ready)

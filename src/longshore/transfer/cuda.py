"""Transfers for CUDA: with streams, events and pinned memory, or without copies for state that stays on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from longshore.transfer.base import CopyHandle, CopyStream, StagedTransfer, UnstagedTransfer
from longshore.transfer.pinned import allocate_pinned


class CudaCopy(CopyHandle):
    def __init__(self, source: Tensor, target: Tensor, event: torch.cuda.Event) -> None:
        self.target = target
        self.event = event
        self._source: Tensor | None = source

    def done(self) -> bool:
        if self._source is not None and self.event.query():
            self._source = None
        return self._source is None

    def wait(self) -> None:
        self.event.synchronize()
        self._source = None


class CudaCopyStream(CopyStream):
    """A CUDA stream for copies in one direction."""

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self.stream = torch.cuda.Stream(device)

    def _start(self, source: Tensor, target: Tensor, ready: Any, after: CopyHandle | None) -> CopyHandle:
        with torch.cuda.stream(self.stream), torch.no_grad():
            # Only the device waits for these events; the host goes on at once.
            if ready is not None:
                self.stream.wait_event(ready)
            if isinstance(after, CudaCopy):
                self.stream.wait_event(after.event)
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.stream)
        # The handle keeps both tensors, so the caching allocator cannot reuse their memory while the copy runs, and no
        # record_stream is needed.
        return CudaCopy(source, target, event)


@contextlib.contextmanager
def _beside(stream: torch.cuda.Stream, ready: torch.cuda.Event) -> Iterator[None]:
    with torch.cuda.stream(stream):
        stream.wait_event(ready)
        yield
        # Afterwards the caller may free what the block read, and every stream sees what it wrote.
        stream.synchronize()


def _mark(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class CudaTransfer(StagedTransfer[CudaCopyStream]):
    """Transfer for the parameters of one CUDA device, with one stream for each direction, events and pinned memory.

    Args:
        device: where the parameters are.
        in_flight_bytes: how many bytes of gradients may be on their way to the host before the thread that enqueues
            them waits.
    """

    def __init__(self, device: torch.device, in_flight_bytes: int = 1 << 28) -> None:
        # Copies to the device read pinned slots that the store owns. They keep no device memory alive, so they need no
        # limit, and the host never has to wait.
        super().__init__(CudaCopyStream(device, in_flight_bytes), CudaCopyStream(device, 1 << 62))
        self.device = device
        self._beside = torch.cuda.Stream(device)

    def __reduce__(self) -> Any:
        return CudaTransfer, (self.device, self.to_host.limit_bytes)

    def allocate(self, num_bytes: int) -> Tensor:
        return allocate_pinned(num_bytes)

    def mark(self) -> Any:
        return _mark(self.device)

    def begin_publish(self) -> None:
        self.to_device.stream.wait_stream(torch.cuda.current_stream(self.device))

    def end_publish(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.to_device.stream)

    def read(self, source: Tensor) -> Tensor:
        return source.cpu()

    def aside(self, ready: Any) -> contextlib.AbstractContextManager[None]:
        return _beside(self._beside, ready)

    def close(self) -> None:
        self.synchronize()


class CudaResidentTransfer(UnstagedTransfer):
    """Transfer for state that stays on the parameters' device: kernels run on the current stream.

    Args:
        device: where the parameters and their state are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._beside = torch.cuda.Stream(device)

    def __reduce__(self) -> Any:
        return CudaResidentTransfer, (self.device,)

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def mark(self) -> Any:
        return _mark(self.device)

    def aside(self, ready: Any) -> contextlib.AbstractContextManager[None]:
        return _beside(self._beside, ready)

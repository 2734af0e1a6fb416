"""What longshore needs of an accelerator beyond ``torch.accelerator``, which it uses for every type of device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

_WITHOUT_STREAMS = {"mps"}
"""Accelerators that ``torch.Stream`` and ``torch.Event`` do not work on."""


def accelerator_type() -> str | None:
    """Return the type of this process's accelerator: ``"cuda"`` (also with ROCm), ``"xpu"``, ``"npu"``, ...; None if
    there is none that longshore can use."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type in _WITHOUT_STREAMS else found.type


def is_accelerator(device: torch.device) -> bool:
    """Return whether ``device`` is of the type of this process's accelerator."""
    return device.type == accelerator_type()


def make_current(device: torch.device) -> None:
    """Make ``device`` the current one of this thread; nothing, if it is the CPU. In a new thread it is the first one,
    where every use of the current device would open a context, which takes memory, also for a rank of another one."""
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of ``device`` records a graph (a CUDA graph, say), and computes nothing now."""
    if device.type == "cpu":
        return False
    asked = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return asked is not None and bool(asked())


@contextlib.contextmanager
def current_stream_is(stream: torch.Stream) -> Iterator[None]:
    """Context in which ``stream`` is the current stream of this thread, and its device the current device.

    ``torch.Stream`` is a context itself, but only in one thread at a time.
    """
    device, before = torch.accelerator.current_device_index(), torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)  # sets the device, too
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)


class WaitingStream:
    """A stream of a device that does nothing but wait, so that its events say when something has ended."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device)

    def after(self, wait: Callable[[], object]) -> torch.Event:
        """Return an event behind what ``wait`` lets the current stream wait for."""
        with current_stream_is(self._stream):
            wait()
            return self._stream.record_event()

    def let_current_wait(self, event: torch.Event) -> None:
        """Let the current stream of the device wait for an event."""
        torch.accelerator.current_stream(self._stream.device).wait_event(event)

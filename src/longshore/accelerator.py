"""Functions of accelerators that ``torch.accelerator`` lacks; longshore uses it for every type of device."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

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
    """Make ``device`` the current one of this thread, which is one of ours; nothing, if it is the CPU. In a new thread
    it is the first one, where every use of the current device would open a context, which takes memory, also for a rank
    of another one."""
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)
        let_others_capture(device)


def new_stream(device: torch.device) -> torch.Stream:
    """Return a stream of ``device`` on which no other collectives wait.

    torch has 32 streams of each priority and hands them out in turn, again and again: those of communicators (nccl's
    have priority 0) and of FSDP2 (-1) may be the same one. A collective that waits there for another rank would hold up
    the work after it, for which that rank may wait.
    """
    return torch.Stream(device, priority=-2)


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of ``device`` records a graph (a CUDA graph, say), and computes nothing now."""
    if device.type == "cpu":
        return False
    asked = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return asked is not None and bool(asked())


def memory_of(device: torch.device) -> tuple[int, int]:
    """Return the bytes of ``device`` that tensors of this process have or could have, and the most that they had."""
    module = torch.get_device_module(device)
    free_bytes, all_bytes = module.mem_get_info(device)
    share = getattr(module, "get_per_process_memory_fraction", lambda device: 1.0)(device)
    return min(free_bytes + module.memory_reserved(device), int(share * all_bytes)), module.max_memory_allocated(device)


def has_graphs(device: torch.device) -> bool:
    """Return whether graphs of ``device`` may have been captured in this process: by ``torch.compile``, or by
    ``torch.cuda.graph`` and ``torch.cuda.make_graphed_callables``. A replay writes the same memory again, also while
    tensors of it are in use."""
    if device.type == "cpu":
        return False
    graph = getattr(torch.get_device_module(device), "graph", None)
    captured = getattr(graph, "default_capture_stream", None) is not None
    return captured or "torch._inductor.cudagraph_trees" in sys.modules


_lets_capture = threading.local()


def let_others_capture(device: torch.device) -> None:
    """Let other threads capture graphs of ``device`` while this one asks whether events are reached.

    CUDA takes a capture for one of the whole process unless it is told otherwise (``capture_error_mode``), and ends it
    with an error when any thread asks. A thread that takes part in no capture may say that it is none of its business.
    """
    if device.type != "cuda" or getattr(_lets_capture, "says_so", False):
        return
    _lets_capture.says_so = True
    runtime, prefix = f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}", "cuda"
    if torch.version.hip is not None:
        runtime, prefix = "libamdhip64.so", "hip"
    mode = ctypes.c_int(_OF_THIS_THREAD)
    with contextlib.suppress(OSError, AttributeError):  # elsewhere there is no such library
        getattr(ctypes.CDLL(runtime), f"{prefix}ThreadExchangeStreamCaptureMode")(ctypes.byref(mode))


_OF_THIS_THREAD = 1
"""``cudaStreamCaptureModeThreadLocal``."""


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


def _ask_until(event: torch.Event) -> None:
    pause_s = 10e-6
    while not event.query():
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 200e-6)


def wait_for(event: torch.Event) -> None:
    """Block this thread until ``event`` is reached, and leave its CPU to the threads that step meanwhile.

    ``event.synchronize()`` keeps asking on CUDA, unless the event was made to block, which ``torch.Event`` cannot ask
    for. Here the pauses grow to a fifth of a millisecond.
    """
    _ask_until(event)
    event.synchronize()  # at once; it raises what went wrong on the device


def number_of(value: Tensor) -> float:
    """Return the number of a tensor with one element; as :func:`wait_for`, waiting leaves the CPU to others."""
    if value.device.type != "cpu":
        _ask_until(torch.accelerator.current_stream(value.device).record_event())
    return value.item()


Mark = torch.Event
"""A position of a stream; if it is of :func:`timed_event`, its ``elapsed_time`` may be asked."""


def timed_event(stream: torch.Stream) -> Mark:
    """Return an event behind all that ``stream`` has to do so far."""
    return stream.record_event(torch.Event(stream.device, enable_timing=True))


def mark_on(device: torch.device) -> Mark:
    """Return an event behind all that the current stream of ``device`` has to do so far."""
    return timed_event(torch.accelerator.current_stream(device))


class Stopwatch:
    """Stopwatch that runs from where the current stream of a device is now, or from now where ``device`` is the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began_s = time.perf_counter()
        self._began = None if device.type == "cpu" else mark_on(device)

    def seconds(self) -> float:
        """Return the seconds until the stream is where it goes on from now, for which this waits; or until now."""
        if self._began is None:
            return time.perf_counter() - self._began_s
        now = mark_on(self._device)
        wait_for(now)
        return self._began.elapsed_time(now) / 1e3


class DeviceClock:
    """Clock that says when events of a device were reached, which the host sees late or not at all."""

    _LOOKS = 5
    """A host that is interrupted between an event and its look at the clock sees it late: the shortest look counts."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.accelerator.synchronize(device)
        looks = [self._look() for _ in range(self._LOOKS)]
        self._origin, _, self._origin_ns = min(looks, key=lambda look: look[2] - look[1])

    def _look(self) -> tuple[Mark, int, int]:
        """Return an event, and times before and after it was reached."""
        before_ns = time.perf_counter_ns()
        event = self.mark()
        event.synchronize()
        return event, before_ns, time.perf_counter_ns()

    def mark(self) -> Mark:
        """Return an event behind all that the current stream has to do so far."""
        return mark_on(self._device)

    def ns_of(self, event: Mark) -> int:
        """Wait for an event; return when it was reached, as ``time.perf_counter_ns``."""
        wait_for(event)
        return self._origin_ns + round(1e6 * self._origin.elapsed_time(event))


class WaitingStream:
    """A stream of a device that does nothing but wait, so that its events say when something has ended."""

    def __init__(self, device: torch.device) -> None:
        self._stream = new_stream(device)

    def after(self, wait: Callable[[], object]) -> torch.Event:
        """Return an event behind the work that ``wait`` lets the current stream wait for."""
        with current_stream_is(self._stream):
            wait()
            return self._stream.record_event()

    def let_current_wait(self, event: torch.Event) -> None:
        """Let the current stream of the device wait for an event."""
        torch.accelerator.current_stream(self._stream.device).wait_event(event)

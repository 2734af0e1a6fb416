"""A device made of CPU memory whose copies really run later, on threads, with seeded delays.

For tests. What is an ordering bug on a GPU is one here too, on any laptop, and
it replays from its seed: a lane that reads a gradient after its memory was let
go of, a buffer that is overwritten while an earlier copy still needs it, a
parameter that is read before it was published.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longshore.transfer.base import CopyHandle, InFlight, Transfer


class SimulatedCopy(CopyHandle):
    def __init__(self, source: Tensor, target: Tensor) -> None:
        self.target = target
        self._source: Tensor | None = source
        self._finished = threading.Event()
        self._failure: BaseException | None = None

    def finish(self, failure: BaseException | None) -> None:
        self._failure = failure
        self._source = None
        self._finished.set()

    def done(self) -> bool:
        return self._finished.is_set()

    def wait(self) -> None:
        self._finished.wait()
        if self._failure is not None:
            raise self._failure


class SimulatedLane:
    """A thread that copies in order, each copy after a delay drawn when it was enqueued.

    The thread knows the queue and not the lane, and ends when the lane is
    closed or garbage.
    """

    def __init__(self, name: str, seed: int, max_delay_s: float, limit_bytes: int) -> None:
        self.delays = 0
        self.in_flight = InFlight(limit_bytes)
        # Autograd threads and the host worker both enqueue.
        self._lock = threading.Lock()
        self._random = random.Random(f"{name} {seed}")
        self._max_delay_s = max_delay_s
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stop = weakref.finalize(self, self._jobs.put, None)
        self._thread = threading.Thread(
            target=_run_jobs, args=(self._jobs,), name=f"longshore-simulated-{name}", daemon=True
        )
        self._thread.start()

    def enqueue(self, source: Tensor, target: Tensor, after: CopyHandle | None) -> SimulatedCopy:
        # A real stream knows an address, not a Python object. The lane keeps a
        # weak reference, so that a handle that fails to own its source shows.
        handle = SimulatedCopy(source, target)
        weak_source, weak_handle = weakref.ref(source), weakref.ref(handle)
        source_bytes = source.numel() * source.element_size()
        with self._lock:
            if not self._stop.alive:
                raise RuntimeError("a copy was enqueued on a lane that is closed")
            delay_s = self._random.uniform(0.0, self._max_delay_s)
            self.in_flight.admit(source_bytes)
            self.in_flight.add(handle, source_bytes)
            self._jobs.put(lambda: self._copy(weak_source, target, weak_handle, after, delay_s))
        return handle

    def _copy(
        self,
        weak_source: weakref.ref[Tensor],
        target: Tensor,
        weak_handle: weakref.ref[SimulatedCopy],
        after: CopyHandle | None,
        delay_s: float,
    ) -> None:
        failure: BaseException | None = None
        try:
            if after is not None:
                after.wait()
            if delay_s > 0:
                self.delays += 1
                time.sleep(delay_s)
            _copy_now(weak_source, target)
        except BaseException as error:
            failure = error
        handle = weak_handle()
        if handle is not None:
            handle.finish(failure)

    def drain(self) -> None:
        with self._lock:
            self.in_flight.drain()

    def close(self) -> None:
        with self._lock:
            self._stop()
        self._thread.join()


def _copy_now(weak_source: weakref.ref[Tensor], target: Tensor) -> None:
    source = weak_source()
    if source is None:
        raise RuntimeError("the source of a copy was freed before the copy ran")
    with torch.no_grad():
        target.copy_(source)


def _run_jobs(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it refers to the lane, which may be garbage before the next job comes


class SimulatedTransfer(Transfer):
    """Lanes as threads; parameters and gradients on the CPU play the device.

    Args:
        seed: of all delays, in both lanes and the worker.
        max_delay_s: each copy waits between 0 and this many seconds first.
        in_flight_bytes: how many bytes of gradients may be on their way.
    """

    staged = True

    def __init__(self, seed: int = 0, max_delay_s: float = 0.002, in_flight_bytes: int = 1 << 26) -> None:
        self.to_host = SimulatedLane("d2h", seed, max_delay_s, in_flight_bytes)
        self.to_device = SimulatedLane("h2d", seed, max_delay_s, in_flight_bytes)
        self._worker_random = random.Random(f"worker {seed}")
        self._max_delay_s = max_delay_s

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def mark(self) -> Any:
        return None

    def copy_to_host(self, source: Tensor, buffer: Tensor | None, ready: Any, after: CopyHandle | None) -> CopyHandle:
        assert buffer is not None
        return self.to_host.enqueue(source, buffer, after)

    def output_for(self, parameter: Tensor, buffer: Tensor | None) -> Tensor:
        assert buffer is not None
        return buffer

    def begin_publish(self) -> None:
        return

    def copy_to_device(self, output: Tensor, parameter: Tensor) -> CopyHandle:
        return self.to_device.enqueue(output, parameter, None)

    def end_publish(self) -> None:
        # The CPU is its own current stream: waiting in stream order is waiting.
        self.to_device.drain()

    def read(self, source: Tensor) -> Tensor:
        return source.clone()

    def worker_delay(self) -> None:
        time.sleep(self._worker_random.uniform(0.0, self._max_delay_s))

    def synchronize(self) -> None:
        self.to_host.drain()
        self.to_device.drain()

    def close(self) -> None:
        self.to_host.close()
        self.to_device.close()

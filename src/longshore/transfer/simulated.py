"""Simulated device in CPU memory whose copies run later, on threads, with seeded delays.

It is meant for tests. An ordering bug on a GPU is a bug here, too, on any laptop, and can be replayed from its seed: a
copy that reads a gradient after its memory was freed, a buffer that is overwritten while an earlier copy still needs
it, a parameter that is read before it was published.
"""

from __future__ import annotations

import atexit
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from longshore.accelerator import Mark
from longshore.transfer.copy_stream import Bundle, Copy, CopyStream, CopyStreams, bytes_between, copy_now, whole_of


class SimulatedCopy(Copy):
    def __init__(self, source: Tensor | Bundle, target: Tensor | Bundle) -> None:
        self.target = whole_of(source, target)
        self.num_bytes = bytes_between(source, target)
        self._source: Tensor | Bundle | None = source
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


class SimulatedCopyStream(CopyStream):
    """Thread that copies in order; each copy waits for a random delay that is drawn when the copy is enqueued.

    The thread refers to the queue but not to the stream, and ends when the stream is closed or garbage-collected.
    """

    def __init__(self, name: str, seed: int, max_delay_s: float, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self.delays = 0
        self._random = random.Random(f"{name} {seed}")
        self._max_delay_s = max_delay_s
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stop = weakref.finalize(self, self._jobs.put, None)
        name = f"longshore-simulated-{name}"
        self._thread = threading.Thread(target=_run_jobs, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()
        _streams.add(self)

    def end_of_queue(self) -> threading.Event:
        """Return an event that is set after the copies that are enqueued now; at once, if the stream is closed."""
        end = threading.Event()
        self._jobs.put(end.set)
        if not self._thread.is_alive():
            end.set()
        return end

    def _start(
        self, source: Tensor | Bundle, target: Tensor | Bundle, ready: Sequence[Mark], after: Copy | None
    ) -> Copy:
        if not self._stop.alive:
            raise RuntimeError("a copy was enqueued on a copy stream that is closed")
        handle = SimulatedCopy(source, target)
        # A real stream has an address and keeps no Python object alive. The thread therefore gets a weak reference, so
        # that a test notices a handle that does not own its source.
        weak_source, weak_handle = weakref.ref(source), weakref.ref(handle)
        delay_s = self._random.uniform(0.0, self._max_delay_s)

        def copy() -> None:
            failure: BaseException | None = None
            try:
                if after is not None:
                    after.wait()
                if delay_s > 0:
                    self.delays += 1
                    time.sleep(delay_s)
                _copy_from(weak_source, target)
            except BaseException as error:
                failure = error
            if (alive := weak_handle()) is not None:
                alive.finish(failure)

        self._jobs.put(copy)
        return handle

    def after_current(self) -> None:
        """There is no device stream: the work that was called before has run."""

    def before_current(self) -> None:
        self.drain()  # there is no device stream that could wait for the copies, so the host waits

    def close(self) -> None:
        with self._lock:
            self._stop()
        self._thread.join()


_streams: weakref.WeakSet[SimulatedCopyStream] = weakref.WeakSet()
_STUCK_S = 5.0


def _finish_copies() -> None:
    """Wait for copies before Python shuts down: a thread that comes back from native code meanwhile ends the process
    (SIGABRT)."""
    ends = [stream.end_of_queue() for stream in list(_streams)]
    until = time.monotonic() + _STUCK_S
    for end in ends:
        end.wait(max(0.0, until - time.monotonic()))


atexit.register(_finish_copies)


def _copy_from(weak_source: weakref.ref[Tensor | Bundle], target: Tensor | Bundle) -> None:
    source = weak_source()
    if source is None:
        raise RuntimeError("the source of a copy was freed before the copy ran")
    with torch.no_grad():
        copy_now(source, target)


def _run_jobs(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # the job refers to the stream, which may become garbage before the next job comes


class SimulatedTransfer(CopyStreams):
    """Copy streams that are threads; CPU memory takes the place of device memory.

    Args:
        seed: seed of all delays, on both streams and in the worker.
        max_delay_s: each copy first waits between 0 and this many seconds.
        in_flight_bytes: how many bytes may be on their way on each stream.
    """

    def __init__(self, seed: int = 0, max_delay_s: float = 0.002, in_flight_bytes: int = 1 << 26) -> None:
        self.down: SimulatedCopyStream
        self.up: SimulatedCopyStream
        down, up = (SimulatedCopyStream(name, seed, max_delay_s, in_flight_bytes) for name in ("d2h", "h2d"))
        super().__init__(down=down, up=up)
        self._arguments = (seed, max_delay_s, in_flight_bytes)
        self._worker_random = random.Random(f"worker {seed}")
        self._max_delay_s = max_delay_s

    def __reduce__(self) -> Any:
        return SimulatedTransfer, self._arguments

    def begin_job(self) -> None:
        time.sleep(self._worker_random.uniform(0.0, self._max_delay_s))

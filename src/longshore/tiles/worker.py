"""Runners of jobs such as adding later arrivals: on a thread while backward goes on, or on the caller's thread.

Both run jobs in the order in which they were submitted, and keep the first failure until ``drain`` returns it.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext

from longshore.kernels import Kernels


class InlineRunner:
    """Runner of each job at once, on the caller's thread, with the methods of :class:`Worker`.

    It is for kernels that only enqueue work: on the stream of the backward that brought the gradient, they run after
    the work that computed it; on another thread's stream, they might not.
    """

    def __init__(self) -> None:
        self.used = False
        self.working: Callable[[], AbstractContextManager[None]] = nullcontext  # not entered by this class
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    def submit(self, job: Callable[[], None], held_bytes: int) -> None:
        self.used = True
        try:
            job()
        except BaseException as failure:
            with self._lock:
                self._failure = self._failure or failure  # the next drain returns it, since hooks must not raise
            if not isinstance(failure, Exception):
                raise

    def drain(self) -> BaseException | None:
        with self._lock:
            failure, self._failure = self._failure, None
            return failure

    def close(self) -> None:
        return


Jobs = queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None]
"""Jobs of one thread, in order; None ends it."""


class Worker:
    """Runner of jobs on a thread of its own, which starts with the first job and ends with this object.

    It is no ThreadPoolExecutor, because those take no jobs after the main thread has ended, when other threads and
    ``atexit`` functions may still train.

    Args:
        limit_bytes: limit of the device gradients that jobs keep in memory until they have run; beyond it ``submit``
            blocks.
        on_start: called before each job (seeded delays, in tests).
        name: name of the thread.
        patience_s: how long ``submit`` blocks at most; None: without limit. Once it gave up, it does not block again
            before the next :meth:`drain`. This is for jobs that wait for something that may wait for the caller.

    Attributes:
        used: whether a job was ever submitted.
        working: returns the context in which each job runs.
    """

    def __init__(
        self,
        limit_bytes: int,
        on_start: Callable[[], None],
        name: str = "longshore-host",
        patience_s: float | None = None,
    ) -> None:
        self.used = False
        self.working: Callable[[], AbstractContextManager[None]] = nullcontext
        self._owner_pid: int | None = None
        """The process that owns the thread."""
        self._thread: threading.Thread | None = None
        self._queue: Jobs = queue.SimpleQueue()
        self._limit_bytes = limit_bytes
        self._on_start = on_start
        self._name = name
        self._patience_s = patience_s
        # Several autograd threads may submit.
        self._lock = threading.Lock()
        self._jobs: deque[tuple[Future[None], int]] = deque()
        self._held_bytes = 0
        self._failure: BaseException | None = None
        self._gave_up = False

    def submit(self, job: Callable[[], None], held_bytes: int) -> None:
        """Queue ``job``, which keeps a gradient of ``held_bytes`` in memory until it has run; may block."""
        self.used = True
        self._check_process(self._thread is not None)
        with self._lock:
            while self._jobs and (
                self._jobs[0][0].done() or (not self._gave_up and self._held_bytes + held_bytes > self._limit_bytes)
            ):
                if self._patience_s is not None and wait([self._jobs[0][0]], self._patience_s).not_done:
                    self._gave_up = True
                    break
                self._retire()
            if self._thread is None:
                self._owner_pid = os.getpid()  # before other threads can see that there is a thread
                self._thread = threading.Thread(target=_run_jobs, args=(self._queue,), name=self._name, daemon=True)
                self._thread.start()
                weakref.finalize(self, self._queue.put, None).atexit = False
            future: Future[None] = Future()
            self._jobs.append((future, held_bytes))
            self._held_bytes += held_bytes
            self._queue.put((future, lambda: self._run(job)))

    def drain(self) -> BaseException | None:
        """Wait for every job; return the first failure since the last drain, if any."""
        self._check_process(bool(self._jobs))
        with self._lock:
            while self._jobs:
                self._retire()
            failure, self._failure = self._failure, None
            self._gave_up = False
            return failure

    def idle_within(self, timeout_s: float) -> bool:
        """Wait until every job has run, at most ``timeout_s`` seconds; return whether all have run."""
        self._check_process(bool(self._jobs))
        with self._lock:
            last = [self._jobs[-1][0]] if self._jobs else []
        return not wait(last, timeout_s).not_done

    def close(self) -> None:
        """Wait for every job, and end the thread."""
        self.drain()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _check_process(self, needs_thread: bool) -> None:
        if needs_thread and os.getpid() != self._owner_pid:
            raise RuntimeError(
                "this process was forked from the one that owns the host worker, whose thread does not exist here; "
                "build the optimizer after the fork"
            )

    def _run(self, job: Callable[[], None]) -> None:
        self._on_start()
        with self.working():
            job()

    def _retire(self) -> None:
        future, held_bytes = self._jobs[0]
        failure = future.exception()  # blocks; after Ctrl-C the job is still in the queue
        self._jobs.popleft()
        self._held_bytes -= held_bytes
        if self._failure is None:
            self._failure = failure


def _run_jobs(jobs: Jobs) -> None:
    while (entry := jobs.get()) is not None:
        future, job = entry
        try:
            job()
        except BaseException as failure:
            future.set_exception(failure)
        else:
            future.set_result(None)
        del entry, future, job  # what they refer to is freed before the next one comes


JobRunner = InlineRunner | Worker


def runner_for(kernels: Kernels, limit_bytes: int, on_start: Callable[[], None]) -> JobRunner:
    """Return the runner for jobs that call these kernels; see :class:`Worker` for the arguments."""
    return InlineRunner() if kernels.asynchronous else Worker(limit_bytes, on_start)

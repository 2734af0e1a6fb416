"""Who adds later arrivals: a thread, while backward goes on; or the caller, where that only enqueues work."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as NotInTime  # another class before Python 3.11
from contextlib import AbstractContextManager, nullcontext

from longshore.kernels import Kernels


class JobRunner(ABC):
    """Runs jobs in the order in which they were submitted, and keeps the first failure.

    Attributes:
        working: entered around each job.
    """

    working: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)

    @abstractmethod
    def submit(self, job: Callable[[], None], held_bytes: int) -> None:
        """Run ``job``, now or later; it holds ``held_bytes`` of a device gradient until it has run."""

    @abstractmethod
    def drain(self) -> BaseException | None:
        """Wait for every job; the first failure since the last drain, if any."""

    @abstractmethod
    def close(self) -> None:
        """Wait for every job, and let go of threads."""


class InlineRunner(JobRunner):
    """Runs each job at once, on the caller's thread.

    For kernels that only enqueue work: on the stream of the backward that brought the gradient
    they are in order with all that made it, and on another thread's stream they would not be.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    def submit(self, job: Callable[[], None], held_bytes: int) -> None:
        try:
            job()
        except BaseException as failure:
            # Found at the next drain, as a thread's would be: hooks do not raise.
            with self._lock:
                self._failure = self._failure or failure
            if not isinstance(failure, Exception):
                raise

    def drain(self) -> BaseException | None:
        with self._lock:
            failure, self._failure = self._failure, None
            return failure

    def close(self) -> None:
        return


class Worker(JobRunner):
    """Runs jobs on a thread of its own.

    A job of a later arrival holds a device gradient until the job has run, so
    ``submit`` blocks while more than ``limit_bytes`` are held in this way.

    Args:
        limit_bytes: of gradients that may wait in the queue.
        on_start: called before each job (seeded delays, in tests).
        name: of the thread.
        patience_s: how long ``submit`` blocks at most; None: as long as it takes. Once it gave up it does not
            block again before the next :meth:`drain`. For jobs that wait for something that may wait for the caller.
    """

    def __init__(
        self,
        limit_bytes: int,
        on_start: Callable[[], None],
        name: str = "longshore-host",
        patience_s: float | None = None,
    ) -> None:
        self._owner_pid = os.getpid()
        self._executor: ThreadPoolExecutor | None = None
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
        """Queue ``job``; blocks while the queue holds too many bytes."""
        self._check_process()
        with self._lock:
            while self._jobs and (self._jobs[0][0].done() or self._is_full(held_bytes)):
                if self._patience_s is not None and wait([self._jobs[0][0]], self._patience_s).not_done:
                    self._gave_up = True
                    break
                self._retire()
            if self._executor is None:
                self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self._name)
            self._jobs.append((self._executor.submit(self._run, job), held_bytes))
            self._held_bytes += held_bytes

    def drain(self) -> BaseException | None:
        if self._jobs:
            self._check_process()
        with self._lock:
            while self._jobs:
                self._retire()
            failure, self._failure = self._failure, None
            self._gave_up = False
            return failure

    def idle_within(self, timeout_s: float) -> bool:
        """Wait until every job has run, for so long at most; whether they have."""
        if self._jobs:
            self._check_process()
        with self._lock:
            last = self._jobs[-1][0] if self._jobs else None
        try:
            if last is not None:
                last.exception(timeout_s)
        except NotInTime:
            return False
        return True

    def close(self) -> None:
        self.drain()
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def _is_full(self, held_bytes: int) -> bool:
        return not self._gave_up and self._held_bytes + held_bytes > self._limit_bytes

    def _check_process(self) -> None:
        if os.getpid() != self._owner_pid:
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


def runner_for(kernels: Kernels, limit_bytes: int, on_start: Callable[[], None]) -> JobRunner:
    """Who runs the jobs of these kernels; see :class:`Worker` for the arguments."""
    return InlineRunner() if kernels.asynchronous else Worker(limit_bytes, on_start)

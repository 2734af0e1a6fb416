"""The thread that adds later arrivals on the host while backward goes on."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Worker:
    """Runs jobs in the order in which they were submitted.

    A job of a later arrival holds a device gradient until the job has run, so
    ``submit`` blocks while more than ``limit_bytes`` are held in this way.

    Args:
        limit_bytes: of gradients that may wait in the queue.
        on_start: called before each job (seeded delays, in tests).
        name: of the thread.
    """

    def __init__(self, limit_bytes: int, on_start: Callable[[], None], name: str = "longshore-host") -> None:
        self._owner_pid = os.getpid()
        self._executor: ThreadPoolExecutor | None = None
        self._limit_bytes = limit_bytes
        self._on_start = on_start
        self._name = name
        # Several autograd threads may submit.
        self._lock = threading.Lock()
        self._jobs: deque[tuple[Future[None], int]] = deque()
        self._held_bytes = 0
        self._failure: BaseException | None = None

    def submit(self, job: Callable[[], None], held_bytes: int) -> None:
        """Queue ``job``; blocks while the queue holds too many bytes."""
        self._check_process()
        with self._lock:
            while self._jobs and (self._jobs[0][0].done() or self._held_bytes + held_bytes > self._limit_bytes):
                self._retire()
            if self._executor is None:
                self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self._name)
            self._jobs.append((self._executor.submit(self._run, job), held_bytes))
            self._held_bytes += held_bytes

    def drain(self) -> BaseException | None:
        """Wait for every job; the first failure since the last drain, if any."""
        if self._jobs:
            self._check_process()
        with self._lock:
            while self._jobs:
                self._retire()
            failure, self._failure = self._failure, None
            return failure

    def close(self) -> None:
        self.drain()
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def _check_process(self) -> None:
        if os.getpid() != self._owner_pid:
            raise RuntimeError(
                "this process was forked from the one that owns the host worker, whose thread does not exist here; "
                "build the optimizer after the fork"
            )

    def _run(self, job: Callable[[], None]) -> None:
        self._on_start()
        job()

    def _retire(self) -> None:
        future, held_bytes = self._jobs[0]
        failure = future.exception()  # blocks; after Ctrl-C the job is still in the queue
        self._jobs.popleft()
        self._held_bytes -= held_bytes
        if self._failure is None:
            self._failure = failure

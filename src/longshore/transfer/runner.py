"""Runners of jobs such as adding later arrivals: on a thread while backward goes on, or on the caller's thread.

Both run jobs in the order in which they were submitted, and keep the first failure until ``drain`` returns it.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Set
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext


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


class JobThread:
    """A thread that runs jobs in order, for one worker or several; it ends with the last of them.

    It is no ThreadPoolExecutor, because those take no jobs after the main thread has ended, when other threads and
    ``atexit`` functions may still train.
    """

    def __init__(self, name: str) -> None:
        self.jobs = queue.SimpleQueue[tuple[Future[bool], Callable[[], None] | None]]()
        """Jobs with their futures; None: a worker leaves, and its future says whether the thread ends."""
        self.workers = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        _threads.add(self)
        self._thread.start()

    def _run(self) -> None:
        ends = False
        while not ends:
            future, job = self.jobs.get()
            try:
                if job is None:
                    ends = _left(self)
                else:
                    job()
            except BaseException as failure:
                future.set_exception(failure)
            else:
                future.set_result(ends)
            del future, job  # what they refer to is freed before the next one comes

    @property
    def ident(self) -> int | None:
        return self._thread.ident

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def leave(self) -> None:
        """End the thread if no other worker has it."""
        future: Future[bool] = Future()
        self.jobs.put((future, None))
        with _waiting_for({future}):
            ends = future.result()
        if ends:
            self._thread.join()


exiting = threading.Event()
"""Set when Python is about to shut down."""
_parked: set[int] = set()
"""Identifiers of threads in :func:`park_until`."""
_wanted: set[Future[bool]] = set()
"""Jobs that a thread waits for."""
_threads = weakref.WeakSet[JobThread]()
_LOOK_S, _STUCK_S, _POLL_S = 0.05, 5.0, 0.001


def _settle() -> None:
    """Wait until no thread is in native code.

    A thread that comes back from it while Python shuts down is ended where it asks for the interpreter's lock, inside a
    C++ destructor, and the process with it (SIGABRT). Jobs are taken afterwards, too: other functions that ``atexit``
    calls may train.
    """
    exiting.set()
    began = time.monotonic()
    futures: dict[Future[bool], JobThread] = {Future(): thread for thread in list(_threads)}
    for future, thread in futures.items():
        thread.jobs.put((future, lambda: None))
    for future, thread in futures.items():
        until = began + _STUCK_S  # one that is stuck does not hold up the process
        while thread.is_alive() and not wait([future], _LOOK_S).done and time.monotonic() < until:
            if thread.ident in _parked:
                break


atexit.register(_settle)


def park_until(done: Callable[[], bool]) -> None:
    """Wait in Python until ``done``; a thread that runs jobs also until another thread waits for a job. If none does
    while the process ends, this one goes nowhere, and least of all into native code."""
    here = threading.get_ident()
    runs_jobs = any(thread.ident == here for thread in list(_threads))
    _parked.add(here)
    try:
        while not done() or (runs_jobs and not _wanted):
            time.sleep(_POLL_S)
    finally:
        _parked.discard(here)


@contextmanager
def _waiting_for(jobs: Set[Future[bool]]) -> Iterator[None]:
    _wanted.update(jobs)
    try:
        yield
    finally:
        _wanted.difference_update(jobs)


_shared: list[JobThread] = []
"""Threads of workers that share them: at most one for each CPU, however many optimizers there are."""
_lock = threading.Lock()


def _after_fork() -> None:
    global _lock, _threads
    _shared.clear()
    _threads = weakref.WeakSet()
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _thread_for(name: str, shares: bool) -> JobThread:
    """Return a thread for one worker more: a new one, or the one with the fewest workers."""
    with _lock:
        most = os.cpu_count() or 1
        if shares and len(_shared) >= most:
            thread = min(_shared, key=lambda each: each.workers)
        else:
            thread = JobThread(name)
            if shares:
                _shared.append(thread)
        thread.workers += 1
        return thread


def _left(thread: JobThread) -> bool:
    with _lock:
        thread.workers -= 1
        if thread.workers == 0 and thread in _shared:
            _shared.remove(thread)
        return thread.workers == 0


class Worker:
    """Runner of jobs on another thread, in order, from the first job to the end of this object.

    Args:
        limit_bytes: limit of the device gradients that jobs keep in memory until they have run; beyond it ``submit``
            blocks.
        on_start: called before each job, on the thread.
        name: name of the thread.
        patience_s: how long ``submit`` blocks at most; None: without limit. Once it gave up, it does not block again
            before the next :meth:`drain`. This is for jobs that wait for something that may wait for the caller, which
            have a thread of their own.

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
        self._thread: JobThread | None = None
        self._limit_bytes = limit_bytes
        self._on_start = on_start
        self._name = name
        self._patience_s = patience_s
        # Several autograd threads may submit.
        self._lock = threading.Lock()
        self._jobs: deque[tuple[Future[bool], int]] = deque()
        self._unawaited = 0
        """How many of the last jobs :meth:`drain` does not wait for."""
        self._held_bytes = 0
        self._failure: BaseException | None = None
        self._gave_up = False

    def submit(self, job: Callable[[], None], held_bytes: int, awaited: bool = True) -> None:
        """Queue ``job``, which keeps a gradient of ``held_bytes`` in memory until it has run; may block.

        ``awaited``: whether :meth:`drain` waits for this job; it does if one that is awaited follows.
        """
        self.used = True
        self._check_process(self._thread is not None)
        with self._lock:
            while self._jobs and (
                self._jobs[0][0].done() or (not self._gave_up and self._held_bytes + held_bytes > self._limit_bytes)
            ):
                first = {self._jobs[0][0]}
                with _waiting_for(first):
                    self._gave_up = self._patience_s is not None and bool(wait(first, self._patience_s).not_done)
                if self._gave_up:
                    break
                self._retire()
            if self._thread is None:
                self._owner_pid = os.getpid()  # before other threads can see that there is a thread
                self._thread = _thread_for(self._name, shares=self._patience_s is None)
                # It may run wherever garbage is collected, so it takes no lock.
                self._finalizer = weakref.finalize(self, self._thread.jobs.put, (Future(), None))
                self._finalizer.atexit = False
            future: Future[bool] = Future()
            self._jobs.append((future, held_bytes))
            self._unawaited = 0 if awaited else self._unawaited + 1
            self._held_bytes += held_bytes
            self._thread.jobs.put((future, lambda: self._run(job)))

    def drain(self) -> BaseException | None:
        """Wait for every awaited job; return the first failure since the last drain, if any."""
        self._check_process(bool(self._jobs))
        with self._lock:
            while len(self._jobs) > self._unawaited or (self._jobs and self._jobs[0][0].done()):
                self._retire()
            failure, self._failure = self._failure, None
            self._gave_up = False
            return failure

    def idle_within(self, timeout_s: float) -> bool:
        """Wait until every awaited job has run, at most ``timeout_s`` seconds; return whether all have run."""
        self._check_process(bool(self._jobs))
        with self._lock:
            awaited = len(self._jobs) - self._unawaited
            last = {self._jobs[awaited - 1][0]} if awaited > 0 else set[Future[bool]]()
        with _waiting_for(last):
            return not wait(last, timeout_s).not_done

    def close(self) -> None:
        """Wait for every job, also those that are not awaited, and leave the thread."""
        self.drain()
        if self._thread is not None:
            self._finalizer.detach()
            if os.getpid() == self._owner_pid:  # a forked process has no such thread
                self._thread.leave()
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
        with _waiting_for({future}):
            failure = future.exception()  # blocks; after Ctrl-C the job is still in the queue
        self._jobs.popleft()
        self._unawaited = min(self._unawaited, len(self._jobs))
        self._held_bytes -= held_bytes
        if self._failure is None:
            self._failure = failure


JobRunner = InlineRunner | Worker


def runner_for(asynchronous: bool, limit_bytes: int, on_start: Callable[[], None]) -> JobRunner:
    """Return the runner for jobs that call kernels, which only enqueue work if they are ``asynchronous``; see
    :class:`Worker` for the other arguments."""
    return InlineRunner() if asynchronous else Worker(limit_bytes, on_start)

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from longshore.transfer.runner import InlineRunner, Worker, runner_for


def worker_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("longshore-host")]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    gc.collect()
    for thread in worker_threads():
        thread.join(timeout=20)
    yield
    gc.collect()
    for thread in worker_threads():
        thread.join(timeout=20)
    assert worker_threads() == []


def nothing() -> None:
    return


def in_thread(target, *args) -> threading.Thread:
    thread = threading.Thread(target=target, args=args)
    thread.start()
    return thread


def test_jobs_run_in_order_on_one_thread() -> None:
    worker = Worker(1000, nothing)
    ran: list[tuple[int, int]] = []
    for i in range(100):
        worker.submit(lambda i=i: ran.append((i, threading.get_ident())), 1)
    assert worker.drain() is None
    assert [i for i, _ in ran] == list(range(100))
    assert len({thread for _, thread in ran} | {threading.get_ident()}) == 2
    worker.close()


def test_each_job_starts_with_the_delay() -> None:
    order: list[str] = []
    worker = Worker(1000, lambda: order.append("delay"))
    for _ in range(3):
        worker.submit(lambda: order.append("job"), 1)
    worker.drain()
    assert order == ["delay", "job"] * 3
    worker.close()


def test_a_thread_exists_only_once_there_is_work() -> None:
    worker = Worker(1000, nothing)
    worker.drain()
    assert worker_threads() == []
    worker.close()


def test_the_bound_blocks_the_submitter_and_lets_go() -> None:
    worker = Worker(100, nothing)
    gate = threading.Event()
    worker.submit(lambda: gate.wait(20), 60)
    worker.submit(nothing, 40)
    third = in_thread(worker.submit, nothing, 1)
    third.join(timeout=0.05)
    assert third.is_alive()
    gate.set()
    third.join(timeout=20)
    assert not third.is_alive()
    assert worker.drain() is None
    assert worker._held_bytes == 0 and not worker._jobs
    worker.close()


def test_one_job_is_always_admitted() -> None:
    worker = Worker(100, nothing)
    ran: list[int] = []
    for i in range(3):
        worker.submit(lambda i=i: ran.append(i), 1000)
    worker.drain()
    assert ran == [0, 1, 2]
    worker.close()


def test_many_submitters_do_not_deadlock() -> None:
    worker = Worker(100, nothing)
    counts: list[int] = []

    def submit() -> None:
        for _ in range(100):
            worker.submit(lambda: counts.append(worker._held_bytes), 30)

    threads = [in_thread(submit) for _ in range(4)]
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
    worker.drain()
    assert len(counts) == 400
    assert 30 <= max(counts) <= 100
    worker.close()


def test_a_failure_is_reported_once_and_work_goes_on() -> None:
    worker = Worker(1000, nothing)
    ran: list[int] = []

    def fail(message: str) -> None:
        raise RuntimeError(message)

    worker.submit(lambda: fail("first"), 1)
    worker.submit(lambda: ran.append(1), 1)
    worker.submit(lambda: fail("second"), 1)
    failure = worker.drain()
    assert isinstance(failure, RuntimeError) and str(failure) == "first"
    assert ran == [1]
    assert worker.drain() is None
    worker.submit(lambda: ran.append(2), 1)
    assert worker.drain() is None
    assert ran == [1, 2]
    worker.close()


def test_a_failure_met_while_submitting_is_kept_for_the_drain() -> None:
    worker = Worker(10, nothing)
    worker.submit(lambda: 1 / 0, 10)  # type: ignore[arg-type, return-value]
    for _ in range(3):
        worker.submit(nothing, 10)
    assert isinstance(worker.drain(), ZeroDivisionError)
    worker.close()


def test_drain_waits() -> None:
    worker = Worker(1000, nothing)
    ran: list[int] = []

    def slowly() -> None:
        time.sleep(0.02)
        ran.append(1)

    worker.submit(slowly, 1)
    worker.submit(slowly, 1)
    worker.drain()
    assert ran == [1, 1]
    worker.close()


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Python leaves SIGINT ignored where it was started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupted_drain_loses_no_job() -> None:
    """Ctrl-C while the worker is busy: the next drain still waits for the job."""
    worker = Worker(1000, nothing)
    gate = threading.Event()
    ran: list[int] = []

    def job() -> None:
        gate.wait(20)
        time.sleep(0.02)
        ran.append(1)

    def interrupt() -> None:
        time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    worker.submit(job, 10)
    thread = in_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        worker.drain()
    thread.join()
    assert ran == [] and worker._held_bytes == 10
    gate.set()
    worker.drain()
    assert ran == [1] and worker._held_bytes == 0
    worker.close()


def test_close_runs_what_is_queued_and_may_be_called_twice() -> None:
    worker = Worker(1000, nothing)
    ran: list[int] = []
    for _ in range(5):
        worker.submit(lambda: ran.append(1), 1)
    worker.close()
    assert len(ran) == 5
    assert worker_threads() == []
    worker.close()


def test_the_thread_ends_when_the_worker_is_garbage() -> None:
    worker = Worker(1000, nothing)
    worker.submit(nothing, 1)
    worker.drain()
    (thread,) = worker_threads()
    del worker
    gc.collect()
    thread.join(timeout=20)
    assert not thread.is_alive()


# --- inline ---


def test_an_inline_runner_runs_at_once_and_keeps_the_first_failure() -> None:
    runner = InlineRunner()
    ran: list[int] = []
    runner.submit(lambda: ran.append(threading.get_ident()), 1 << 60)
    assert ran == [threading.get_ident()]
    assert runner.drain() is None

    def fail(message: str) -> None:
        raise RuntimeError(message)

    for message in ("first", "second"):
        runner.submit(lambda message=message: fail(message), 1)
    runner.submit(lambda: ran.append(0), 1)
    assert str(runner.drain()) == "first"
    assert runner.drain() is None
    assert len(ran) == 2
    runner.close()


def test_ctrl_c_in_an_inline_job_ends_the_backward_and_is_kept() -> None:
    runner = InlineRunner()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.submit(interrupt, 1)
    assert isinstance(runner.drain(), KeyboardInterrupt)


def test_kernels_that_only_enqueue_need_no_thread() -> None:
    assert isinstance(runner_for(True, 1, nothing), InlineRunner)
    assert isinstance(runner_for(False, 1, nothing), Worker)


def test_idle_within_says_whether_every_job_has_run() -> None:
    worker, go = Worker(1 << 20, lambda: None), threading.Event()
    assert worker.idle_within(0.0)
    worker.submit(go.wait, 0)
    assert not worker.idle_within(0.01)
    go.set()
    assert worker.idle_within(60.0)
    worker.close()

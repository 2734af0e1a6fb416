from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from longshore.transfer import Copy, SimulatedTransfer, simulated
from longshore.transfer.simulated import SimulatedCopy


@pytest.fixture
def transfer() -> Iterator[SimulatedTransfer]:
    transfer = SimulatedTransfer(seed=1)
    yield transfer
    transfer.close()


class RecordedTime:
    """In place of the module ``time``: notes what would have been slept."""

    def __init__(self) -> None:
        self.slept: dict[str, list[float]] = {}

    def sleep(self, seconds: float) -> None:
        self.slept.setdefault(threading.current_thread().name, []).append(seconds)


def up(transfer: SimulatedTransfer, source: torch.Tensor, after: Copy | None = None) -> Copy:
    return transfer.stage(source, torch.zeros_like(source), transfer.mark(), after)


# -- order and delays ---------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_copies_of_a_stream_run_in_order(seed: int) -> None:
    transfer = SimulatedTransfer(seed=seed)
    target = torch.zeros(3)
    handles = [transfer.stage(torch.full((3,), float(i)), target, (), None) for i in range(20)]
    for i, handle in enumerate(handles):
        handle.wait()
        assert all(earlier.done() for earlier in handles[:i])
        assert target[0] >= i
    assert torch.equal(target, torch.full((3,), 19.0))
    assert transfer.down.delays == 20
    transfer.close()


def test_the_streams_are_two(transfer: SimulatedTransfer, gate) -> None:
    """A copy to the device does not queue behind one to the host."""
    blocked = up(transfer, torch.ones(3), after=gate)
    transfer.publish(torch.ones(3), torch.zeros(3)).wait()
    assert not blocked.done()
    gate.open()


def delays_of(seed: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    recorded = RecordedTime()
    monkeypatch.setattr(simulated, "time", recorded)
    transfer = SimulatedTransfer(seed=seed, max_delay_s=0.25)
    for _ in range(10):
        up(transfer, torch.ones(3))
        transfer.publish(torch.ones(3), torch.zeros(3))
        transfer.begin_job()
    transfer.synchronize()
    transfer.close()
    return recorded.slept


def test_delays_replay_from_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = delays_of(7, monkeypatch)
    assert [len(delays) for delays in slept.values()] == [10, 10, 10]
    assert len({tuple(delays) for delays in slept.values()}) == 3  # the streams and the worker draw on their own
    assert all(0 < delay <= 0.25 for delays in slept.values() for delay in delays)
    assert delays_of(7, monkeypatch) == slept
    assert delays_of(8, monkeypatch) != slept


def test_a_copy_really_runs_later() -> None:
    transfer = SimulatedTransfer(seed=2, max_delay_s=0.3)
    source, parameter = torch.ones(3), torch.zeros(3)
    started = time.perf_counter()
    handle = transfer.publish(source, parameter)
    assert not handle.done() and torch.equal(parameter, torch.zeros(3))
    transfer.end_publish()
    assert handle.done() and torch.equal(parameter, torch.ones(3))
    assert time.perf_counter() - started > 0.2  # what the seed draws is more
    assert transfer.up.delays == 1
    transfer.close()


def test_no_delay_when_none_is_asked_for() -> None:
    transfer = SimulatedTransfer(max_delay_s=0)
    up(transfer, torch.ones(3)).wait()
    assert transfer.down.delays == 0
    transfer.close()


def test_after_is_honoured(transfer: SimulatedTransfer, gate) -> None:
    buffer = torch.zeros(3)
    handle = transfer.stage(torch.ones(3), buffer, (), gate)
    time.sleep(0.02)  # ten times the longest delay
    assert not handle.done() and torch.equal(buffer, torch.zeros(3))
    gate.open()
    handle.wait()
    assert torch.equal(buffer, torch.ones(3))


def test_a_slot_is_reused_after_its_publish() -> None:
    for seed in range(10):
        transfer = SimulatedTransfer(seed=seed)
        slot, parameter = torch.full((3,), 5.0), torch.zeros(3)
        published = transfer.publish(slot, parameter)
        transfer.stage(torch.full((3,), 9.0), slot, (), published).wait()
        assert torch.equal(parameter, torch.full((3,), 5.0)) and torch.equal(slot, torch.full((3,), 9.0))
        transfer.close()


# -- ownership ----------------------------------------------------------------


def test_the_source_may_be_let_go_of_at_once(transfer: SimulatedTransfer, gate) -> None:
    buffer = torch.zeros(3)
    transfer.stage(torch.full((3,), 4.0), buffer, (), gate)  # neither source nor handle is kept
    gc.collect()
    gate.open()
    transfer.synchronize()
    assert torch.equal(buffer, torch.full((3,), 4.0))


def test_a_handle_that_does_not_own_its_source_is_found_out(
    transfer: SimulatedTransfer, gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above bites: a stream knows an address, and nothing keeps what is there."""
    owning = SimulatedCopy.__init__

    def careless(self: SimulatedCopy, source: torch.Tensor, target: torch.Tensor) -> None:
        owning(self, source, target)
        self._source = None

    monkeypatch.setattr(SimulatedCopy, "__init__", careless)
    handle = up(transfer, torch.full((3,), 4.0), after=gate)
    gate.open()
    with pytest.raises(RuntimeError, match="freed before the copy ran"):
        handle.wait()


def test_the_source_is_free_when_the_copy_is_done(transfer: SimulatedTransfer) -> None:
    source = torch.ones(3)
    freed = weakref.ref(source)
    handle = up(transfer, source)
    del source
    handle.wait()
    assert freed() is None  # though the handle lives, and nobody has enqueued anything since
    assert torch.equal(handle.target, torch.ones(3))


# -- the bound ----------------------------------------------------------------


def test_the_bound_blocks_the_enqueuer(gate) -> None:
    transfer = SimulatedTransfer(in_flight_bytes=24)
    for _ in range(2):
        up(transfer, torch.ones(3), after=gate)
    third = threading.Thread(target=up, args=(transfer, torch.ones(3)))
    third.start()
    third.join(timeout=0.05)
    assert third.is_alive()
    gate.open()
    third.join(timeout=20)
    assert not third.is_alive()
    assert transfer.down.peak_bytes == 24
    transfer.close()


@pytest.mark.parametrize("seed", range(3))
def test_concurrent_enqueuers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = SimulatedTransfer(seed=seed, max_delay_s=0.0002, in_flight_bytes=100)
    start = transfer.down._start

    def slowly(*arguments: Any) -> Copy:
        time.sleep(0.0001)  # the others find that there is room
        return start(*arguments)

    monkeypatch.setattr(transfer.down, "_start", slowly)
    results: list[tuple[Copy, float]] = []

    def enqueue(first: int) -> None:
        for value in range(first, first + 50):
            results.append((up(transfer, torch.full((3,), float(value))), float(value)))

    threads = [threading.Thread(target=enqueue, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    for handle, value in results:
        handle.wait()
        assert torch.equal(handle.target, torch.full((3,), value))
    assert len(results) == transfer.down.delays == 200
    assert 12 < transfer.down.peak_bytes <= 100
    transfer.close()


# -- failure ------------------------------------------------------------------


def test_a_failed_copy_is_reported_and_the_stream_goes_on(transfer: SimulatedTransfer) -> None:
    gate = SimulatedCopy(torch.ones(1), torch.ones(1))  # until both are enqueued, neither is known to fail
    failed = transfer.stage(torch.ones(3), torch.zeros(2), (), gate)
    later = up(transfer, torch.ones(3))
    gate.finish(None)
    later.wait()
    assert failed.done()
    with pytest.raises(RuntimeError, match="size"):
        failed.wait()


def test_a_copy_after_a_failed_one_fails(transfer: SimulatedTransfer) -> None:
    failed = transfer.publish(torch.ones(3), torch.zeros(2))
    dependent = up(transfer, torch.ones(3), after=failed)
    with pytest.raises(RuntimeError, match="size"):
        dependent.wait()
    with pytest.raises(RuntimeError, match="size"):
        transfer.end_publish()
    with pytest.raises(RuntimeError, match="size"):
        transfer.synchronize()
    up(transfer, torch.ones(3)).wait()


# -- the rest of the interface ------------------------------------------------


def test_reading_copies(transfer: SimulatedTransfer) -> None:
    parameter = torch.ones(3)
    host = transfer.read(parameter)
    parameter.zero_()
    assert torch.equal(host, torch.ones(3))


def test_the_kernel_writes_into_the_buffer(transfer: SimulatedTransfer) -> None:
    buffer = transfer.allocate(64)
    assert buffer.dtype == torch.uint8 and buffer.shape == (64,)
    assert transfer.staged
    assert transfer.output_for(torch.zeros(64), buffer) is buffer


# -- threads ------------------------------------------------------------------


def threads_of(transfer: SimulatedTransfer) -> list[threading.Thread]:
    return [stream._thread for stream in (transfer.down, transfer.up)]


def test_close_joins_the_threads_when_all_is_copied() -> None:
    transfer = SimulatedTransfer()
    threads, handles = threads_of(transfer), [up(transfer, torch.ones(3)) for _ in range(5)]
    assert all(thread.is_alive() for thread in threads)
    transfer.close()
    assert not any(thread.is_alive() for thread in threads)
    assert all(handle.done() for handle in handles)
    transfer.close()
    with pytest.raises(RuntimeError, match="closed"):
        up(transfer, torch.ones(3))


def test_threads_end_when_the_transfer_is_garbage(gate) -> None:
    transfer = SimulatedTransfer()
    threads = threads_of(transfer)
    handles = [up(transfer, torch.ones(3), after=gate) for _ in range(3)]
    del transfer
    gate.open()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
    assert all(torch.equal(handle.target, torch.ones(3)) for handle in handles)


def test_a_stream_at_rest_keeps_nothing_alive() -> None:
    transfer = SimulatedTransfer()
    threads, gone = threads_of(transfer), weakref.ref(transfer)
    buffer = torch.zeros(3)
    freed = weakref.ref(buffer)
    transfer.stage(torch.ones(3), buffer, (), None).wait()
    del buffer
    transfer.synchronize()
    for _ in range(100):  # the thread has told the handle, and then lets go
        if freed() is None:
            break
        time.sleep(0.01)
    assert freed() is None
    del transfer
    assert gone() is None
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()


AT_EXIT = """
import atexit
handles = []
atexit.register(lambda: print([handle.done() for handle in handles]))  # the first one registered runs last
import torch
from longshore import SimulatedTransfer
transfer = SimulatedTransfer(max_delay_s=0.3)
for _ in range(4):
    handles.append(transfer.stage(torch.ones(3), torch.zeros(3), (), None))
"""


@pytest.mark.medium
def test_copies_are_done_before_python_shuts_down() -> None:
    """A thread that comes back from a copy in that moment would end the process."""
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=True)
    assert done.stdout == f"{[True] * 4}\n"

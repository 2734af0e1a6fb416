"""The same promises as in test_simulated.py, with real streams.

:func:`keep_busy` holds the current stream back, so that what should wait for it would otherwise certainly run too
early.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from on_device import busy_stream, current_device, device_type, keep_busy

from longshore.accelerator import current_stream_is
from longshore.transfer import Copy, DeviceStreams
from longshore.transfer.runner import Worker

pytestmark = pytest.mark.gpu

NUMEL = 1 << 24
LONG = 200_000_000
"""Cycles: about a tenth of a second."""


@pytest.fixture
def transfer() -> Iterator[DeviceStreams]:
    transfer = DeviceStreams.to_host(current_device())
    # What loads lazily, loads now, and not between a sleep and what races with it.
    warm = torch.zeros(8, device=device_type()).fill_(1.0).clone()
    keep_busy(1)
    slot = floats(transfer, 8)
    transfer.stage(warm, slot, transfer.mark(), None).wait()
    transfer.publish(slot, warm).wait()
    torch.accelerator.synchronize()
    yield transfer
    transfer.close()


def floats(transfer: DeviceStreams, numel: int = NUMEL) -> torch.Tensor:
    return transfer.allocate(4 * numel).view(torch.float32)


def all_are(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor == value).all())


def test_buffers_are_pinned(transfer: DeviceStreams) -> None:
    block = transfer.allocate(1000)
    assert block.dtype == torch.uint8 and block.shape == (1000,) and block.is_pinned()


def test_a_copy_waits_for_its_mark_and_not_for_the_host(transfer: DeviceStreams) -> None:
    source, buffer = torch.zeros(NUMEL, device=device_type()), floats(transfer)
    torch.accelerator.synchronize()
    keep_busy(LONG)
    source.fill_(7.0)
    handle = transfer.stage(source, buffer, transfer.mark(), None)
    assert not handle.done()
    handle.wait()
    assert handle.done() and handle.target is buffer
    assert all_are(buffer, 7.0)


def test_a_wait_leaves_its_cpu_to_others(transfer: DeviceStreams) -> None:
    source, buffer = torch.zeros(NUMEL, device=device_type()), floats(transfer)
    torch.accelerator.synchronize()
    keep_busy(4 * LONG)
    handle = transfer.stage(source, buffer, transfer.mark(), None)
    began, began_work = time.perf_counter(), time.thread_time()
    handle.wait()
    assert time.thread_time() - began_work < (time.perf_counter() - began) / 4


def test_without_its_mark_a_copy_is_early(transfer: DeviceStreams) -> None:
    """The test above bites."""
    source, buffer = torch.zeros(NUMEL, device=device_type()), floats(transfer)
    torch.accelerator.synchronize()
    keep_busy(LONG)
    source.fill_(7.0)
    transfer.stage(source, buffer, (), None).wait()
    assert all_are(buffer, 0.0)
    torch.accelerator.synchronize()


def test_later_work_on_the_current_stream_is_not_waited_for(transfer: DeviceStreams) -> None:
    source, buffer = torch.full((NUMEL,), 3.0, device=device_type()), floats(transfer)
    ready = transfer.mark()
    torch.accelerator.synchronize()
    with busy_stream(LONG):
        (later,) = transfer.mark()
        transfer.stage(source, buffer, ready, None).wait()
        assert all_are(buffer, 3.0)
        assert not later.query()
    torch.accelerator.synchronize()


def test_the_source_may_be_let_go_of_at_once(transfer: DeviceStreams) -> None:
    buffers = [floats(transfer) for _ in range(4)]
    torch.accelerator.synchronize()
    keep_busy(LONG)
    for value, buffer in enumerate(buffers):
        source = torch.full((NUMEL,), float(value), device=device_type())
        transfer.stage(source, buffer, transfer.mark(), None)
        del source
        torch.full((NUMEL,), -1.0, device=device_type())  # would take the memory if it were free
    transfer.synchronize()
    assert [all_are(buffer, float(value)) for value, buffer in enumerate(buffers)] == [True] * 4


def test_the_source_is_free_when_the_copy_is_done(transfer: DeviceStreams) -> None:
    buffer = floats(transfer)
    gc.collect()
    before = torch.accelerator.memory_allocated()
    handle = transfer.stage(torch.ones(NUMEL, device=device_type()), buffer, transfer.mark(), None)
    assert torch.accelerator.memory_allocated() >= before + 4 * NUMEL
    handle.wait()
    assert torch.accelerator.memory_allocated() == before
    assert all_are(handle.target, 1.0)


def test_another_thread_enqueues(transfer: DeviceStreams) -> None:
    """As the worker does with a later arrival: marked in a hook, copied from its own thread."""
    source, buffer = torch.zeros(NUMEL, device=device_type()), floats(transfer)
    torch.accelerator.synchronize()
    keep_busy(LONG)
    source.fill_(7.0)
    ready = transfer.mark()
    handles: list[Copy] = []
    thread = threading.Thread(target=lambda: handles.append(transfer.stage(source, buffer, ready, None)))
    thread.start()
    thread.join()
    handles[0].wait()
    assert all_are(buffer, 7.0)


def test_concurrent_enqueuers(transfer: DeviceStreams) -> None:
    results: list[tuple[Copy, float]] = []
    buffers = floats(transfer, 4 * 20 * 1024).view(4, 20, 1024)

    def enqueue(row: int) -> None:
        for i in range(20):
            source = torch.full((1024,), float(100 * row + i), device=device_type())
            handle = transfer.stage(source, buffers[row, i], transfer.mark(), None)
            results.append((handle, float(100 * row + i)))

    threads = [threading.Thread(target=enqueue, args=(row,)) for row in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    for handle, value in results:
        handle.wait()
        assert all_are(handle.target, value)


def test_the_bound_holds_and_gradients_are_freed_early() -> None:
    transfer = DeviceStreams.to_host(current_device(), in_flight_bytes=2 * 4 * NUMEL)
    buffers = [floats(transfer) for _ in range(8)]
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    for value, buffer in enumerate(buffers):
        source = torch.full((NUMEL,), float(value), device=device_type())
        transfer.stage(source, buffer, transfer.mark(), None)
        del source
    assert transfer.down.peak_bytes == 2 * 4 * NUMEL
    # Two under way and the one that is being made, of the eight.
    assert torch.accelerator.max_memory_allocated() - before <= 3 * 4 * NUMEL
    transfer.synchronize()
    assert torch.accelerator.memory_allocated() == before
    assert [all_are(buffer, float(value)) for value, buffer in enumerate(buffers)] == [True] * 8
    transfer.close()


def test_a_publish_waits_for_what_still_reads_and_later_work_sees_it(transfer: DeviceStreams) -> None:
    parameter, slot = torch.zeros(NUMEL, device=device_type()), floats(transfer)
    slot.fill_(5.0)
    old, new = torch.empty_like(parameter), torch.empty_like(parameter)
    torch.accelerator.synchronize()
    keep_busy(LONG)
    old.copy_(parameter)
    transfer.begin_publish()
    handle = transfer.publish(transfer.output_for(parameter, slot), parameter)
    assert not handle.done()
    transfer.end_publish()
    new.copy_(parameter)
    torch.accelerator.synchronize()
    assert all_are(old, 0.0) and all_are(new, 5.0)


def test_a_slot_is_reused_after_its_publish(transfer: DeviceStreams) -> None:
    parameter, slot = torch.zeros(NUMEL, device=device_type()), floats(transfer)
    slot.fill_(5.0)
    gradient = torch.full((NUMEL,), 9.0, device=device_type())
    ready = transfer.mark()
    torch.accelerator.synchronize()
    keep_busy(LONG)  # the publish is late, the gradient is not
    transfer.begin_publish()
    published = transfer.publish(slot, parameter)
    transfer.end_publish()
    transfer.stage(gradient, slot, ready, published).wait()
    torch.accelerator.synchronize()
    assert all_are(parameter, 5.0) and all_are(slot, 9.0)


def test_reading_blocks(transfer: DeviceStreams) -> None:
    parameter = torch.zeros(NUMEL, device=device_type())
    keep_busy(LONG)
    parameter.fill_(2.0)
    assert all_are(transfer.read(parameter), 2.0)


def test_synchronize_waits_for_both_streams(transfer: DeviceStreams) -> None:
    source, buffer = torch.ones(NUMEL, device=device_type()), floats(transfer)
    keep_busy(LONG)
    down = transfer.stage(source, buffer, transfer.mark(), None)
    transfer.begin_publish()
    up = transfer.publish(floats(transfer), source)
    transfer.synchronize()
    assert down.done() and up.done()


@pytest.mark.parametrize("kind", [DeviceStreams.to_host, DeviceStreams])
def test_work_aside_waits_for_its_mark_and_is_done_at_the_end(kind: Callable[[torch.device], DeviceStreams]) -> None:
    """On another thread, as a reduction is: its own current stream knows nothing of ours."""
    device = current_device()
    transfer = kind(device)
    source, copy, stream = torch.zeros(NUMEL, device=device), torch.zeros(NUMEL, device=device), torch.Stream(device)
    torch.accelerator.synchronize()
    with stream:
        keep_busy(LONG)
        source.fill_(7.0)
        filled_on = transfer.stream()
    ready = transfer.marks({filled_on})

    def work() -> None:
        with transfer.aside(ready):
            copy.copy_(source)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(ready) == 2 and all(each.query() for each in ready)
    assert all_are(copy, 7.0)
    transfer.close()


@pytest.mark.parametrize("kind", [DeviceStreams.to_host, DeviceStreams])
def test_what_is_read_aside_may_be_let_go_of(kind: Callable[[torch.device], DeviceStreams]) -> None:
    transfer, home = kind(current_device()), torch.accelerator.current_stream()
    source, copy = (torch.full((NUMEL,), value, device=device_type()) for value in (7.0, 0.0))
    torch.accelerator.synchronize()
    with transfer.aside(transfer.marks({home})):
        keep_busy(LONG)
        copy.copy_(source)
        transfer.read_aside(source)
        del source
        with current_stream_is(home):
            torch.full((NUMEL,), -1.0, device=device_type())  # would take the memory if it were free
    assert all_are(copy, 7.0)
    transfer.close()


def test_the_stream_before_is_current_again() -> None:
    before, beside = torch.accelerator.current_stream(), torch.Stream(current_device())
    with current_stream_is(beside):
        assert torch.accelerator.current_stream() == beside != before
    assert torch.accelerator.current_stream() == before


def test_what_stays_on_the_device_is_not_copied() -> None:
    device = current_device()
    transfer = DeviceStreams(device)
    tensor = torch.ones(4, device=device)
    handle = transfer.stage(tensor, None, transfer.mark(), None)
    assert handle.done() and handle.target is tensor
    assert transfer.output_for(tensor, None) is tensor and transfer.read(tensor) is tensor
    assert not transfer.staged and transfer.allocate(8).device == device


def test_jobs_of_the_worker_have_its_device() -> None:
    """A new thread begins with the first one, where a rank of another one would open a context, which takes memory."""
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two accelerators")
    transfer = DeviceStreams.to_host(torch.device(device_type(), 1))
    worker = Worker(1, transfer.begin_job)
    found: list[int] = []
    worker.submit(lambda: found.append(torch.accelerator.current_device_index()), 0)
    assert worker.drain() is None and found == [1]
    worker.close()
    transfer.close()
    assert torch.accelerator.current_device_index() == 0


@pytest.mark.parametrize("beside", [False, True])
def test_parameters_on_the_host_are_written_once_they_are_copied(beside: bool) -> None:
    """``beside``: they are copied on a stream that the current one does not know of."""
    device = current_device()
    transfer = DeviceStreams.to_host(device, publishes=False)
    parameter = floats(transfer, 1000).fill_(3.0)
    stream = torch.Stream(device) if beside else torch.accelerator.current_stream(device)
    torch.accelerator.synchronize()
    with current_stream_is(stream):
        keep_busy(LONG)
        copy = torch.empty(1000, device=device).copy_(parameter, non_blocking=True)
    transfer.begin_publish()
    new = torch.full((1000,), 4.0)
    assert transfer.output_for(parameter, new) is parameter
    assert transfer.publish(new, parameter).done()
    transfer.end_publish()
    torch.accelerator.synchronize()
    assert all_are(copy, 3.0) and all_are(parameter, 4.0)
    assert transfer.staged and not transfer.publishes
    transfer.close()

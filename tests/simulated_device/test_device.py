"""The simulated accelerator shows what a GPU would do to wrong code, and does to right code what a CPU does."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from simulated_device import counts, native

pytestmark = pytest.mark.simulated
DEVICE = torch.device("sim", 0)
OTHER = torch.device("sim", 1)


@pytest.fixture(autouse=True)
def _as_new() -> Iterator[None]:
    torch.accelerator.synchronize(0)
    torch.accelerator.synchronize(1)
    torch.accelerator.reset_peak_memory_stats(0)
    native().reset_counts()
    yield
    native().set_delays(0, 0, 0)
    native().set_budget(1 << 35)


def slow(us: int = 20_000) -> None:
    """Keep the current stream busy, so that what is launched next runs later than the host goes on."""
    native().sleep_us(us)


def test_values_are_those_of_the_cpu() -> None:
    native().set_delays(1, 50, 50)

    def trained(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 9), nn.GELU(), nn.Linear(9, 3)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        inputs = torch.randn(5, 7).to(device)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), torch.tensor([0, 1, 2, 0, 1], device=device)).backward()
            optimizer.step()
        return [each.detach().cpu() for each in model.parameters()]

    for ours, theirs in zip(trained(DEVICE), trained(torch.device("cpu")), strict=True):
        assert torch.equal(ours, theirs)


def test_the_host_cannot_touch_its_memory() -> None:
    script = (
        "import ctypes, resource, torch, simulated_device; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); "
        "simulated_device.register(); x = torch.ones(4, device='sim'); "
        "torch.sim.synchronize(); print('there', flush=True); ctypes.string_at(x.data_ptr(), 4)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert ended.stdout == "there\n", ended.stderr
    assert ended.returncode == -11


def test_a_copy_that_is_not_waited_for_is_not_there() -> None:
    source = torch.arange(4.0, device=DEVICE)
    target = torch.full((4,), -1.0, pin_memory=True)
    torch.accelerator.synchronize()
    slow()
    target.copy_(source, non_blocking=True)
    event = torch.Event(DEVICE.type)
    event.record()
    assert not event.query()
    assert target.tolist() == [-1.0] * 4
    event.synchronize()
    assert target.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_pinned_source_is_read_later_and_a_pageable_one_at_once() -> None:
    pinned, pageable = torch.ones(4, pin_memory=True), torch.ones(4)
    slow()
    late, early = pinned.to(DEVICE, non_blocking=True), pageable.to(DEVICE, non_blocking=True)
    pinned.zero_()
    pageable.zero_()
    assert late.sum().item() == 0.0
    assert early.sum().item() == 4.0


def test_pinned_memory_outlives_the_copy_that_reads_it() -> None:
    gc.collect()  # other tests of this process may have left some
    before = native().pinned_bytes()
    slow()
    there = torch.ones(1000, pin_memory=True).to(DEVICE, non_blocking=True)
    torch.zeros(1000, pin_memory=True)
    assert there.sum().item() == 1000.0
    assert native().pinned_bytes() == before


def test_streams_wait_for_events_alone() -> None:
    side = torch.Stream(DEVICE)
    values = torch.zeros(4, device=DEVICE)
    torch.accelerator.synchronize()
    slow()
    values += 1
    ready = torch.Event(DEVICE.type)
    ready.record()
    with side:
        early = values * 1  # without a wait
    side.wait_event(ready)
    with side:
        late = values * 1
    side.synchronize()
    assert early.tolist() == [0.0] * 4
    assert late.tolist() == [1.0] * 4


@pytest.mark.parametrize("recorded", [False, True])
def test_freed_memory_is_handed_out_at_once(recorded: bool) -> None:
    """A stream that still reads it gets NaN, unless the allocator was told of that stream."""
    side = torch.Stream(DEVICE)
    values = torch.ones(4, device=DEVICE)
    torch.accelerator.synchronize()
    with side:
        slow()
        copy = values * 1
    if recorded:
        values.record_stream(side)
    address = values.data_ptr()
    del values
    again = torch.empty(4, device=DEVICE)
    assert (again.data_ptr() == address) != recorded
    side.synchronize()
    assert copy.isnan().any().item() != recorded


def test_a_budget() -> None:
    torch.accelerator.empty_cache()
    budget = torch.accelerator.memory_allocated() + 10_000  # other tests may have left some
    native().set_budget(budget)
    kept = torch.zeros(1000, device=DEVICE)
    torch.zeros(1200, device=DEVICE)  # freed, and cached by its size
    other = torch.zeros(1300, device=DEVICE)  # does not fit beside the cached one
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 512 bytes on device 0"):
        _ = [torch.zeros(100, device=DEVICE) for _ in range(10)]
    assert torch.accelerator.max_memory_allocated() <= budget
    assert torch.zeros(1000, device=OTHER).sum().item() == 0.0
    native().set_budget(1 << 35)
    assert (kept.sum() + other.sum()).item() == 0.0


@pytest.mark.parametrize("priority", [0, -1, -2])
def test_memory_is_given_back_once_no_stream_uses_it(priority: int) -> None:
    """As with CUDA, whatever the priority of the stream."""
    stream = torch.Stream(DEVICE, priority=priority)
    pinned = torch.zeros(1 << 12, pin_memory=True)
    with stream:
        values = torch.ones(1 << 12, device=DEVICE)
        stream.synchronize()
        native().set_delays(0, 0, 20_000)
        try:
            for _ in range(5):
                pinned.copy_(values, non_blocking=True)
            del values
            torch.accelerator.empty_cache()
            stream.synchronize()
        finally:
            native().set_delays(0, 0, 0)
    assert bool((pinned == 1).all())


def test_what_is_counted() -> None:
    source = torch.ones(1000, pin_memory=True)
    there = source.to(DEVICE, non_blocking=True)
    twice = there * 2
    assert twice.sum().item() == 2000.0
    torch.accelerator.synchronize()
    assert counts() == {
        "launches": 2,
        "copies_to_device": 1,
        "copies_to_host": 1,
        "bytes_to_device": 4000,
        "bytes_to_host": 4,
        "host_waits": 2,
    }


def test_an_error_in_a_kernel_is_raised_by_the_next_wait() -> None:
    wrong = nn.functional.embedding(torch.tensor([5], device=DEVICE), torch.ones(3, 2, device=DEVICE))
    with pytest.raises(RuntimeError, match="a kernel failed: index out of range"):
        torch.accelerator.synchronize()
    assert wrong.shape == (1, 2)
    assert torch.ones(2, device=DEVICE).sum().item() == 2.0  # it is raised once


def test_two_devices() -> None:
    here = torch.arange(4.0, device=DEVICE)
    slow()
    here += 1
    there = here.to(OTHER)
    assert there.device == OTHER
    assert there.tolist() == [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        here + there
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        here + torch.ones(4)
    with pytest.raises(RuntimeError, match="there is no device 2"):
        torch.ones(1, device="sim:2")


_VALUES, _INDICES, _ROWS = torch.ones(4, 4), torch.tensor([0, 1]), torch.zeros(4, 1, dtype=torch.int64)
_MASK, _ONE = torch.ones(4, 4, dtype=torch.bool), torch.tensor(1)
_MIXED: dict[str, Callable[[Tensor], Any]] = {
    "embedding": lambda x: nn.functional.embedding(_INDICES, x),
    "embedding of one": lambda x: nn.functional.embedding(_ONE, x),
    "embedding_bag": lambda x: nn.functional.embedding_bag(_INDICES, x, torch.tensor([0])),
    "index_select": lambda x: x.index_select(0, _INDICES),
    "index_fill": lambda x: x.index_fill(0, _INDICES, 1.0),
    "index_fill at one": lambda x: x.index_fill(0, _ONE, 1.0),
    "index_add": lambda x: x.index_add(0, _INDICES, x[:2]),
    "index_put of values": lambda x: x.index_put((_INDICES,), _VALUES[:2]),
    "index of a host's tensor": lambda x: _VALUES[_INDICES.to(DEVICE)],
    "gather": lambda x: x.gather(1, _ROWS),
    "scatter": lambda x: x.scatter(1, _ROWS, x),
    "take": lambda x: x.take(_INDICES),
    "where": lambda x: torch.where(_MASK, x, x),
    "masked_fill": lambda x: x.masked_fill(_MASK, 0.0),
    "masked_fill by one": lambda x: x.masked_fill(torch.tensor(True), 0.0),
    "cat": lambda x: torch.cat([x, _VALUES]),
    "stack of single elements": lambda x: torch.stack([x[0, 0], torch.tensor(1.0)]),
    "mm": lambda x: x.mm(_VALUES),
    "addmm of a single element": lambda x: torch.addmm(torch.tensor(1.0), x, x),
    "linear's bias": lambda x: nn.functional.linear(x, x, _VALUES[0]),
    "add": lambda x: x + _VALUES,
    "add of one element with a dimension": lambda x: x + torch.ones(1),
    "add to a host's element": lambda x: torch.tensor(1.0).add_(x[0, 0]),
    "cross_entropy": lambda x: nn.functional.cross_entropy(x, torch.zeros(4, dtype=torch.int64)),
    "out": lambda x: torch.add(x, x, out=torch.empty(4, 4)),
}


@pytest.mark.parametrize("name", _MIXED)
def test_what_cuda_refuses_from_the_host_is_refused(name: str) -> None:
    there = torch.ones(4, 4, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"same device|indices should be either on cpu or on"):
        _MIXED[name](there)


def test_what_cuda_takes_from_the_host_is_taken() -> None:
    there, host = torch.rand(4, 4, device=DEVICE), torch.tensor(2.0)
    here = there.cpu()
    taken: list[Callable[[Tensor], Tensor]] = [
        lambda x: x[_INDICES],
        lambda x: x[_MASK],
        lambda x: x.index_put((_INDICES,), host),
        lambda x: x + host,
        lambda x: host / x,
        lambda x: x.maximum(host),
        lambda x: torch.where(x > 0.5, x, host),
        lambda x: x.masked_fill(x > 0.5, host),
        lambda x: x.lerp(x + 1, host),
    ]
    for each in taken:
        assert torch.equal(each(there).cpu(), each(here))


def test_a_backward_runs_on_the_thread_of_its_device() -> None:
    threads = []
    leaf = torch.ones(3, device=DEVICE, requires_grad=True)
    leaf.register_hook(lambda gradient: threads.append(threading.get_ident()))
    (leaf * 2).sum().backward()
    assert threads != [threading.get_ident()]


def test_random_numbers_can_be_drawn_again() -> None:
    torch.sim.manual_seed(3)  # pyright: ignore
    state = torch.sim.get_rng_state()  # pyright: ignore
    first = torch.randn(4, device=DEVICE)
    hosts = torch.get_rng_state()
    torch.sim.set_rng_state(state)  # pyright: ignore
    assert torch.equal(first.cpu(), torch.randn(4, device=DEVICE).cpu())
    assert torch.equal(hosts, torch.get_rng_state())  # the host's generator is another one
    own = torch.Generator(DEVICE).manual_seed(3)
    assert torch.equal(first.cpu(), torch.randn(4, device=DEVICE, generator=own).cpu())


def test_batch_norm_and_dropout() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(6, 4)
    ours, theirs = nn.BatchNorm1d(4).to(DEVICE), nn.BatchNorm1d(4)
    assert torch.allclose(ours(inputs.to(DEVICE)).cpu(), theirs(inputs))
    dropped = nn.functional.dropout(torch.ones(1000, device=DEVICE)).cpu()
    assert set(dropped.tolist()) == {0.0, 2.0}


def test_autocast() -> None:
    with torch.autocast("sim", torch.bfloat16):
        assert (torch.ones(2, 2, device=DEVICE) @ torch.ones(2, 2, device=DEVICE)).dtype == torch.bfloat16

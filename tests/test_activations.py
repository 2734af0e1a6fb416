"""Inputs of checkpointed calls on an accelerator: copies beside the computation, and the same gradients."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from on_device import busy_stream, current_device, device_type, keep_busy
from torch import Tensor, nn

from longshore import activations
from longshore.accelerator import current_stream_is
from longshore.activations import HostInput, InputsOfCall, PinnedBlocks
from longshore.checkpointing import checkpoint, configure, held_host_bytes
from longshore.engine import activation_checkpointing
from longshore.transfer import DeviceCopyStream

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _on_host() -> Iterator[None]:
    configure(checkpoint_in_cpu=True)
    yield
    activation_checkpointing.install(None)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> PinnedBlocks:
    made = PinnedBlocks()
    monkeypatch.setattr(activations, "_blocks", made)
    return made


def copies() -> torch.Stream:
    """The stream of copies to the host."""
    return activations._streams(current_device())[0].stream


def fetches() -> torch.Stream:
    """The stream of copies back to the device."""
    return activations._streams(current_device())[1].stream


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many elements each copy back to the device has, in their order."""
    found: list[int] = []
    begin = DeviceCopyStream.fetch

    def recorded(self: DeviceCopyStream, source: Tensor, *rest: Any) -> Any:
        found.append(source.numel())
        return begin(self, source, *rest)

    monkeypatch.setattr(DeviceCopyStream, "fetch", recorded)
    return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + self.two(self.one(x).sin() * scale)


def network(count: int = 4) -> list[Block]:
    torch.manual_seed(3)
    return [Block().to(device_type()) for _ in range(count)]


def gradients(network: list[Block], wrap: Callable[..., Tensor], rows: int = 6, busy: int = 0) -> list[Tensor]:
    """Of two forwards ahead of two backwards, the first of which is that of the first."""
    torch.manual_seed(1)
    inputs = [torch.randn(rows, 24).to(device_type()).requires_grad_() for _ in range(2)]
    scale = torch.rand(40).to(device_type())
    losses = []
    for x in inputs:
        out = x * 1
        for block in network:
            if busy:
                keep_busy(busy)
            out = wrap(block, out, scale)
        losses.append(out.square().sum())
    for loss in losses:
        loss.backward()
    found = [*inputs, *(parameter for block in network for parameter in block.parameters())]
    grads = [each.grad.clone() for each in found if each.grad is not None]
    for block in network:
        block.zero_grad()
    return grads


def plain(block: Block, *inputs: Tensor) -> Tensor:
    return block(*inputs)


@pytest.mark.parametrize("busy", [0, 200_000])
def test_gradients_are_those_without_checkpoints(busy: int) -> None:
    blocks = network()
    expected = gradients(blocks, plain)
    for _ in range(6):
        found = gradients(blocks, checkpoint, busy=busy)
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
        assert held_host_bytes() == 0


def test_inputs_of_the_call_before_are_fetched_ahead(fetched: list[int]) -> None:
    x = torch.ones(3, device=device_type(), requires_grad=True)
    inputs = [torch.ones(size, device=device_type(), requires_grad=True) for size in (10, 20, 30)]
    out = x * 1
    seen: list[list[int]] = []

    def call(out: Tensor, more: Tensor) -> Tensor:
        seen.append(fetched[:])
        return out.sin() * more.sum()

    for more in inputs:
        out = checkpoint(call, out, more)
    assert fetched == []
    out.sum().backward()
    # Each call of backward begins when its own inputs, and those of the call before, are on their way.
    assert [sorted(each) for each in seen[3:]] == [[3, 3, 20, 30], [3, 3, 3, 10, 20, 30], [3, 3, 3, 10, 20, 30]]


def test_without_memory_for_the_call_before_its_inputs_are_fetched_later(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    expected = gradients(model, plain)
    fetch_before, begin = InputsOfCall.fetch_before, DeviceCopyStream.fetch
    ahead: list[InputsOfCall] = []
    refused: list[Any] = []

    def noted(self: InputsOfCall) -> None:
        ahead.append(self)
        try:
            fetch_before(self)
        finally:
            ahead.pop()

    def full(self: DeviceCopyStream, *rest: Any) -> Any:
        if ahead:
            refused.append(rest)
            raise torch.OutOfMemoryError("no memory is left")
        return begin(self, *rest)

    monkeypatch.setattr(InputsOfCall, "fetch_before", noted)
    monkeypatch.setattr(DeviceCopyStream, "fetch", full)
    found = gradients(model, checkpoint)
    assert refused and all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_the_host_waits_for_nothing_while_copies_run() -> None:
    tensor = torch.arange(1000.0, device=device_type())
    with busy_stream(2_000_000_000):
        saved = HostInput(tensor * 2)
        saved.fetch()
        back = saved.restore()
        mark = torch.accelerator.current_stream().record_event()
        assert not mark.query()
    assert torch.equal(back.cpu(), torch.arange(1000.0) * 2)


def test_an_input_is_fetched_once_it_is_on_the_host() -> None:
    with current_stream_is(copies()):
        keep_busy(200_000_000)
    saved = HostInput(torch.full((50_000,), 7.0, device=device_type()))
    saved.fetch()
    assert saved.restore().cpu().eq(7).all()


def test_another_stream_may_use_what_was_fetched() -> None:
    expected = torch.arange(100_000.0)
    saved = HostInput(expected.to(device_type()))
    saved.fetch()
    torch.accelerator.synchronize()
    first, beside = torch.accelerator.current_stream(), torch.Stream(current_device())
    with current_stream_is(beside), busy_stream(200_000_000):
        back = saved.restore()
        found = back * 1
        del back, saved
        with current_stream_is(first):
            others = [torch.zeros(100_000, device=device_type()) for _ in range(4)]
    torch.accelerator.synchronize()
    assert torch.equal(found.cpu(), expected) and not any(other.any() for other in others)


def test_a_graph_that_is_dropped_while_its_inputs_are_fetched() -> None:
    """What is fetched for nobody must not be written into memory that others have got meanwhile."""
    saved = HostInput(torch.full((50_000,), 7.0, device=device_type()))
    torch.accelerator.synchronize()
    with current_stream_is(fetches()):
        keep_busy(200_000_000)
    saved.fetch()
    del saved
    others = [torch.zeros(50_000, device=device_type()) for _ in range(4)]
    torch.accelerator.synchronize()
    assert not any(other.any() for other in others)


def test_an_input_is_fetched_into_memory_that_work_under_way_has_read() -> None:
    saved = HostInput(torch.full((50_000,), 7.0, device=device_type()))
    other = torch.full((50_000,), 3.0, device=device_type())
    torch.accelerator.synchronize()
    keep_busy(200_000_000)
    read = other + 0
    del other  # whose memory the fetch gets
    saved.fetch()
    torch.accelerator.synchronize()
    assert read.cpu().eq(3).all()


def test_the_next_input_waits_for_what_reads_its_memory(blocks: PinnedBlocks) -> None:
    saved = HostInput(torch.full((50_000,), 7.0, device=device_type()))
    with current_stream_is(fetches()):
        keep_busy(200_000_000)
    with current_stream_is(torch.Stream(current_device())):  # nothing else of the one that saves the next waits for it
        back = saved.restore()
    del saved
    other = HostInput(torch.full((50_000,), 8.0, device=device_type()))
    assert blocks.allocated_bytes == 200_000
    torch.accelerator.synchronize()
    assert back.cpu().eq(7).all() and other.restore().cpu().eq(8).all()


def test_what_is_on_the_host_leaves_the_device(blocks: PinnedBlocks) -> None:
    held = torch.get_device_module().memory_allocated
    before = held()
    saved = [HostInput(torch.ones(1 << 20, device=device_type())) for _ in range(3)]
    torch.accelerator.synchronize()
    saved[-1].fetch()
    assert held() - before == 4 << 20


@pytest.mark.parametrize("fetched_ahead", [False, True])
def test_graphs_that_are_dropped_keep_no_memory_of_the_device(blocks: PinnedBlocks, fetched_ahead: bool) -> None:
    """Losses that were not finite and are skipped, whose last inputs the next backward has fetched ahead."""
    held = torch.get_device_module().memory_allocated
    x = torch.randn(1 << 20, device=device_type(), requires_grad=True)
    others = [HostInput(x) for _ in range(6)]  # so many blocks of the host are free afterwards
    del others
    before = held()
    for _ in range(5):
        skipped = checkpoint(torch.sin, x * 1)
        if fetched_ahead:
            checkpoint(torch.sin, x * 1).sum().backward()
            x.grad = None
        del skipped
    torch.accelerator.synchronize()
    assert held() <= before


def test_pinned_memory_is_used_again(blocks: PinnedBlocks) -> None:
    model = network()
    gradients(model, checkpoint)
    gc.collect()
    first = blocks.allocated_bytes
    assert first == 2 * 4 * (6 * 24 + 40) * 4
    for _ in range(3):
        gradients(model, checkpoint)
    assert blocks.allocated_bytes == first
    gradients(model, checkpoint, rows=50)  # larger ones take their place
    assert blocks.allocated_bytes <= 2 * 4 * (50 * 24 + 40) * 4
    gradients(model, checkpoint, rows=6)
    assert blocks.allocated_bytes <= 2 * 4 * (50 * 24 + 40) * 4


def test_memory_of_the_host_is_pinned_and_not_given_to_two(blocks: PinnedBlocks) -> None:
    saved = [HostInput(torch.full((n,), float(n), device=device_type())) for n in (100, 100, 104)]
    assert all(each._host.is_pinned() for each in saved)
    saved.pop(0)
    saved.append(HostInput(torch.full((96,), 96.0, device=device_type())))  # in the block of the one that is gone
    assert blocks.allocated_bytes == 4 * (100 + 100 + 104)
    assert [each.restore().cpu().unique().tolist() for each in saved] == [[100.0], [104.0], [96.0]]


def test_device_memory_is_free_while_inputs_are_on_the_host() -> None:
    device = torch.get_device_module()
    x = torch.randn(1 << 20, device=device_type(), requires_grad=True)  # 4 MiB
    held: list[int] = []

    def call(out: Tensor) -> Tensor:
        torch.accelerator.synchronize()
        held.append(device.memory_allocated())
        return out.sin()

    out = x * 1
    for _ in range(8):
        out = checkpoint(call, out)
    out.sum().backward()
    # Backward: the gradient and its product, the call's input and output, and the input of the call before.
    assert max(held[8:]) - held[0] <= 6 << 22
    assert x.grad is not None


def test_a_graph_that_is_kept_keeps_one_copy_of_each_direction(blocks: PinnedBlocks) -> None:
    x = torch.randn(100, device=device_type(), requires_grad=True)
    loss = checkpoint(torch.sin, x * 1).sum()
    for _ in range(5):
        loss.backward(retain_graph=True)
    (saved,) = [each for each in activations._alive if each._copies]
    assert len(saved._copies) == 2

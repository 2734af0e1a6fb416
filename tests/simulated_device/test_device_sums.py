"""Sums of gradients on the device, with streams and a memory of limited size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from streaming.test_chaos import delays
from torch import Tensor, nn

import longshore
from longshore.tiles.arrivals import DeviceSums
from longshore.tiles.memory import Slots
from simulated_device import counts, native

pytestmark = pytest.mark.simulated

PLENTY = 1 << 35
WIDTH, LAYERS = 96, 4
WEIGHTS = LAYERS * (WIDTH + 1) * WIDTH


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    delays(0, 0, 0)
    yield
    native().set_budget(PLENTY)
    delays(0, 0, 0)


class Training:
    def __init__(self, accumulate: str, released: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.model = nn.Sequential(*layers).to("sim", torch.bfloat16)
        offload = longshore.Offload(accumulate=accumulate, tile_numel=4096, **options)  # pyright: ignore
        self.optimizer = longshore.AdamW(self.model.parameters(), lr=1e-2, release_gradients=released, offload=offload)

    def backward(self, number: int, stream: torch.Stream | None = None, layers: int = LAYERS) -> None:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)).to("sim", torch.bfloat16)
        if stream is None:
            self.model[:layers](x).float().pow(2).mean().backward()
            return
        here = torch.accelerator.current_stream()
        stream.wait_stream(here)
        torch.accelerator.set_stream(stream)
        self.model(x).float().pow(2).mean().backward()
        torch.accelerator.set_stream(here)
        here.wait_stream(stream)
        x.record_stream(stream)

    def window(self, *numbers: int, stream: torch.Stream | None = None) -> list[int]:
        """Return the bytes that each backward, and then the step, copied to the host."""
        copied = []
        for place, number in enumerate(numbers):
            before = counts()["bytes_to_host"]
            self.backward(number, stream if place % 2 else None)
            copied.append(counts()["bytes_to_host"] - before)
        before = counts()["bytes_to_host"]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [*copied, counts()["bytes_to_host"] - before]

    @property
    def weights(self) -> list[Tensor]:
        return [parameter.detach().cpu() for parameter in self.model.parameters()]


def assert_equal(ours: Training, theirs: Training) -> None:
    for one, other in zip(ours.weights, theirs.weights, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("ahead", [0, "100%"])
def test_from_the_second_window_on_sums_stay_by_themselves(ahead: Any) -> None:
    auto, host = Training("auto", speculation_memory=ahead), Training("host", speculation_memory=ahead)
    assert sum(auto.window(0, 1, 2)) == (3 + 1) * 2 * WEIGHTS  # with the parameters, of which masters are made
    for window in range(1, 4):
        copied = auto.window(*range(3 * window, 3 * window + 3))
        assert copied[:2] == [0, 0] and 0 <= sum(copied) - 4 * WEIGHTS < 64  # a checksum or two
    for window in range(4):
        host.window(*range(3 * window, 3 * window + 3))
    assert_equal(auto, host)


def test_a_device_that_is_nearly_full_keeps_what_it_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The room is what all tensors but sums never took, less a sixteenth of the device."""
    others, room = 1 << 20, 4 * WEIGHTS // 2
    total, taken = (others + room) * 16 // 15 + 16, 0

    def memory(device: torch.device) -> tuple[int, int]:
        return total, others + taken

    monkeypatch.setattr("longshore.tiles.arrivals.memory_of", memory)
    auto, host = Training("auto"), Training("host")
    for window in range(3):
        auto.backward(3 * window)
        sums = auto.optimizer._core.members.store.tiles.tier.device_sums
        kept = [*sums]
        assert len(kept) == 0 if window == 0 else 0 < len(kept) < 2 * LAYERS
        auto.backward(3 * window + 1)
        taken = max(taken, sums.num_bytes)  # the peak is in the last forward, when sums are there, too
        assert taken <= room + 16
        auto.window(3 * window + 2)
        host.window(*range(3 * window, 3 * window + 3))
    others += room  # a longer sequence
    auto.window(9, 10)
    host.window(9, 10)
    for training in (auto, host):
        training.backward(11)
    assert not auto.optimizer._core.members.store.tiles.tier.device_sums
    for training in (auto, host):
        training.window(12)
    assert_equal(auto, host)


def test_without_host_memory_for_sums_the_host_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums come to memory that is not pinned."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("no memory can be pinned")

    auto, host = Training("auto"), Training("host")
    with monkeypatch.context() as patched:
        patched.setattr("longshore.tiles.memory.Slots.for_sums", fails)
        auto.window(0, 1, 2)
        auto.window(3, 4, 5)
    for training in (auto, host):
        for window in range(0 if training is host else 2, 4):
            training.window(*range(3 * window, 3 * window + 3))
    assert_equal(auto, host)


def test_memory_for_sums_is_never_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host added in the first window; its memory for that is gone before other memory is pinned in the second."""
    auto, counted = Training("auto"), []
    made = Slots.for_sums

    def counting(self: Slots, sizes: Any) -> Any:
        counted.append(auto.optimizer.host_bytes()["accumulators"])
        return made(self, sizes)

    monkeypatch.setattr(Slots, "for_sums", counting)
    auto.window(0, 1, 2)
    auto.window(3, 4, 5)
    assert counted == [0] and auto.optimizer.host_bytes()["accumulators"] >= 4 * WEIGHTS


def test_more_backwards_that_are_announced() -> None:
    """Tiles that had one gradient have no memory yet to which their sums could be copied."""
    auto, host = Training("auto"), Training("host")
    for training in (auto, host):
        training.backward(0, layers=1)
        training.window(1)
        training.optimizer._core.members.store.expect_backwards(3)
        training.window(2, 3, 4)
        training.window(5, 6, 7)
    assert_equal(auto, host)


def test_without_memory_for_a_sum_the_host_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    add, made = DeviceSums.add, []

    def on_a_full_device(self: DeviceSums, parameter: int, gradient: Tensor) -> bool:
        torch.accelerator.empty_cache()
        native().set_budget(torch.accelerator.memory_allocated())
        made.append(add(self, parameter, gradient))
        native().set_budget(PLENTY)
        return made[-1]

    device, host = Training("device"), Training("host")
    for training in (device, host):
        training.window(0, 1, 2)
    with monkeypatch.context() as patched:
        patched.setattr(DeviceSums, "add", on_a_full_device)
        device.window(3, 4, 5)
    host.window(3, 4, 5)
    assert False in made
    for training in (device, host):
        training.window(6, 7, 8)
    assert_equal(device, host)


@pytest.mark.parametrize("seed", range(6))
def test_backwards_on_several_streams(seed: int) -> None:
    device, host = Training("device"), Training("host")
    delays(seed, 100, 200)
    stream = torch.Stream(device="sim")
    for training in (device, host):
        for window in range(3):
            training.window(*range(4 * window, 4 * window + 4), stream=stream)
    assert_equal(device, host)

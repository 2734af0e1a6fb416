"""Sums of gradients on the device: the bits of the host's sums, and no copy before the last backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from freed import without_collector
from torch import Tensor, nn

import longshore
from longshore import Offload, SimulatedTransfer
from longshore.tiles.arrivals import DeviceSums

TILE = 256
SHAPES = [(40, 30), (30,), (7,), (30, 25), (25,), (1,)]


class Training:
    """An optimizer with gradients that are taken in backward, and one with every gradient in ``.grad`` of float32."""

    def __init__(self, accumulate: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
        self.transfer = SimulatedTransfer(seed=seed)
        offload = Offload(
            tile_numel=TILE,
            transfer=self.transfer,
            accumulate=accumulate,
            **options,  # pyright: ignore[reportArgumentType]
        )
        self.optimizer = longshore.AdamW(self.parameters, lr=0.1, release_gradients=True, offload=offload)
        self.copies: list[int] = []
        copy = self.transfer.down.copy

        def counted(source: Any, *arguments: Any) -> Any:
            self.copies.append(source.nbytes)
            return copy(source, *arguments)

        self.transfer.down.copy = counted

    def backward(self, number: int, without: tuple[int, ...] = ()) -> None:
        generator = torch.Generator().manual_seed(number)
        loss = torch.zeros(())
        for index, parameter in enumerate(self.parameters):
            factors = torch.randn(parameter.shape, generator=generator)
            if index not in without:
                loss = loss + (parameter.float() * factors).sum() ** 2
        loss.backward()

    def window(self, *numbers: int, clip: float = 0.0) -> None:
        for number in numbers:
            self.backward(number)
        if clip:
            self.optimizer.clip_grad_norm_(clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def store(self) -> Any:
        return self.optimizer._core.members.store.tiles

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]


def equal(program: Callable[[Training], None], *, kept: bool | None = True, **options: Any) -> Training:
    """Run a program with sums on the device and on the host; the weights and states are equal."""
    device, host = Training("device", **options), Training("host", **options)
    for training in (device, host):
        program(training)
        training.optimizer.step()
    states = [training.optimizer.state_dict() for training in (device, host)]
    for index, (ours, theirs) in enumerate(zip(device.weights(), host.weights(), strict=True)):
        assert torch.equal(ours, theirs), index
    for index in range(len(SHAPES)):
        for name, value in states[0]["state"][index].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[1]["state"][index][name])), (index, name)
    ours, theirs = sum(device.copies), sum(host.copies)
    assert ours <= theirs if kept is None else (ours < theirs) is kept
    return device


ACCUMULATION = {
    "always three": [3, 3, 3, 3],
    "more than foreseen": [2, 3, 4, 5],
    "fewer than foreseen": [4, 3, 2, 3],
    "one in between": [3, 1, 3, 1],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ahead", [0, "100%"])
@pytest.mark.parametrize("accumulation", ACCUMULATION)
def test_the_bits_are_those_of_the_hosts_sums(accumulation: str, ahead: Any, dtype: torch.dtype) -> None:
    def program(training: Training) -> None:
        number = 0
        for backwards in ACCUMULATION[accumulation]:
            training.window(*range(number, number + backwards), clip=0.5 if number % 2 else 0.0)
            number += backwards
        training.window(number)

    equal(program, dtype=dtype, speculation_memory=ahead)


@pytest.mark.parametrize("seed", range(20))
def test_random_programs(seed: int) -> None:
    def program(training: Training) -> None:
        dice = torch.Generator().manual_seed(seed)

        def roll(most: int) -> int:
            return int(torch.randint(most, (), generator=dice))

        optimizer = training.optimizer
        for number in range(40):
            what = roll(12)
            if what < 7:
                training.backward(number, without=tuple(range(roll(3))))
            elif what == 7:
                optimizer.grad_norm()
            elif what == 8:
                optimizer.clip_grad_norm_(0.1 + roll(5))
                optimizer.step()
                optimizer.zero_grad()
            elif what == 9:
                training.parameters[roll(len(SHAPES))].grad = None
            elif what == 10 and roll(3) == 0:
                optimizer.zero_grad()
            else:
                optimizer.step()
                if roll(4):
                    optimizer.zero_grad()

    equal(program, kept=None, seed=seed, speculation_memory=[0, "100%", 20_000][seed % 3])


@pytest.fixture
def steady() -> Training:
    """After two windows of three backwards, with nothing counted."""
    training = Training("device")
    for _ in range(2):
        training.window(0, 1, 2)
    training.copies.clear()
    return training


def test_nothing_is_copied_before_the_last_backward(steady: Training) -> None:
    steady.backward(3)
    steady.backward(4)
    assert steady.copies == []
    assert steady.store.device_bytes()["accumulators"] == 4 * sum(p.numel() for p in steady.parameters)
    steady.backward(5)
    assert sum(steady.copies) == 4 * sum(parameter.numel() for parameter in steady.parameters)
    assert steady.store.device_bytes() == {}
    steady.optimizer.step()
    assert sum(steady.copies) == 4 * sum(parameter.numel() for parameter in steady.parameters)


def test_small_sums_leave_together(steady: Training) -> None:
    for number in range(3):
        steady.backward(number)
    host = Training("host")
    host.backward(0)
    assert len(steady.copies) <= len(host.copies)


def test_a_sum_that_nobody_asked_for_leaves_at_the_step(steady: Training) -> None:
    steady.backward(3)
    steady.backward(4)
    steady.optimizer.step()
    assert sum(steady.copies) == 4 * sum(parameter.numel() for parameter in steady.parameters)


def test_a_single_gradient_leaves_in_its_own_dtype() -> None:
    training = Training("device")
    for number in range(3):
        training.window(number)
        assert sum(training.copies) == 2 * sum(parameter.numel() for parameter in training.parameters)
        training.copies.clear()
    assert training.store.device_bytes() == {}


def test_what_is_discarded_is_not_copied(steady: Training) -> None:
    steady.backward(3)
    steady.backward(4)
    steady.optimizer.zero_grad()
    assert steady.copies == [] and steady.store.device_bytes() == {}
    steady.backward(5)
    steady.parameters[0].grad = None
    steady.optimizer.step()
    assert sum(steady.copies) == 2 * sum(parameter.numel() for parameter in steady.parameters[1:])


def test_gradients_that_are_read_and_written_in_between() -> None:
    def program(training: Training) -> None:
        for number in range(9):
            training.backward(number)
            states = training.optimizer._core.members.store.states
            if number % 3 == 1:
                states.write(0, "gradient", states.read(0, "gradient") * 2)
            if number % 3 == 2:
                training.optimizer.step()
                training.optimizer.zero_grad()

    equal(program, kept=False)  # what was read has left


def test_without_memory_for_a_sum_the_host_adds(monkeypatch: pytest.MonkeyPatch, steady: Training) -> None:
    """The first sums of a window find no memory: their gradients leave, and the others too."""
    usual = Training("host")
    for _ in range(2):
        usual.window(0, 1, 2)
    add, asked = DeviceSums.add, []

    def without_memory(self: Any, parameter: int, gradient: Tensor) -> bool:
        asked.append(parameter)
        with monkeypatch.context() as patched:
            patched.setattr(Tensor, "float", no_memory)
            return add(self, parameter, gradient)

    def no_memory(self: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(DeviceSums, "add", without_memory)
    for training in (steady, usual):
        for window in range(2):
            training.window(*range(3 + window, 6 + window))
    assert len(asked) == len(SHAPES)  # once for each; then the host has them all
    for ours, theirs in zip(steady.weights(), usual.weights(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_copy_that_fails_ends_the_window(steady: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    before = steady.weights()
    steady.backward(3)
    steady.backward(4)

    def fails(*_: Any) -> None:
        raise RuntimeError("the link is gone")

    with monkeypatch.context() as patched:
        patched.setattr(steady.transfer.down, "copy", fails)
        with pytest.raises(longshore.GradientError, match="the link is gone") as told:
            steady.optimizer.step()
    cause = told.value.__cause__
    assert "in fails" in str(cause)  # where it failed
    with pytest.raises(longshore.GradientError, match="the link is gone"):
        steady.optimizer.step()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(steady.weights(), before, strict=True))
    steady.optimizer.zero_grad()
    steady.window(5, 6, 7)


def test_a_gradient_that_a_hook_kept_and_somebody_writes() -> None:
    """In plain PyTorch the write would be one to .grad."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(40, 30))
    kept: list[Tensor] = []
    parameter.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))  # pyright: ignore
    offload = Offload(transfer=SimulatedTransfer(), accumulate="device")
    optimizer = longshore.AdamW([parameter], release_gradients=True, offload=offload)
    (parameter * 2).sum().backward()
    kept[0].mul_(7)
    with pytest.raises(longshore.GradientError, match="was written after backward had brought it"):
        optimizer.step()
    optimizer.zero_grad()
    (parameter * 2).sum().backward()
    (parameter * 2).sum().backward()
    optimizer.step()


def test_memory_for_sums_goes_when_there_are_none(steady: Training) -> None:
    numel = sum(tile.layout.buffer_numel for tile in steady.store.tiles)
    assert steady.optimizer.host_bytes()["accumulators"] >= 4 * numel
    for number in range(3):
        steady.window(number)
        assert (steady.optimizer.host_bytes()["accumulators"] > 0) is (number < 2)
    host = Training("host")
    for training, windows in ((host, [(0, 1, 2), (0, 1, 2), (0,), (1,), (2,)]), (steady, [])):
        for window in windows:
            training.window(*window)
    for training in (steady, host):
        training.window(3, 4, 5)
        training.window(6, 7, 8)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(steady.weights(), host.weights(), strict=True))


def test_always_one_backward_takes_no_memory_for_sums() -> None:
    training = Training("device")
    for number in range(4):
        training.window(number)
        assert training.optimizer.host_bytes()["accumulators"] == 0


def test_without_pinned_memory_sums_come_to_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no memory can be pinned")

    def program(training: Training) -> None:
        with monkeypatch.context() as patched:
            patched.setattr("longshore.tiles.memory.Slots.for_sums", fails)
            training.window(0, 1, 2)
            training.window(3, 4, 5, 6)
        training.window(7, 8, 9)

    equal(program)


def test_an_optimizer_that_is_closed_lets_go_of_sums(steady: Training) -> None:
    steady.backward(3)
    steady.backward(4)
    steady.optimizer.close()
    assert steady.store.device_bytes() == {}
    with pytest.raises(
        longshore.LongshoreError, match="was closed before the step for which gradients were on the dev"
    ):
        steady.optimizer.step()


def test_what_fails_at_the_step_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with without_collector():
        training = Training("device")
        training.window(0, 1, 2)
        training.backward(3)
        training.backward(4)

        def fails(*_: Any) -> None:
            raise RuntimeError("the link is gone")

        training.transfer.down.copy = fails
        with pytest.raises(longshore.GradientError):
            training.optimizer.step()
        store = weakref.ref(training.store)
        del training
        assert store() is None


@pytest.mark.parametrize("value", ["gpu", None, True])
def test_another_place_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="accumulate is where several gradients of one window are added: 'device'"):
        Offload(accumulate=value)

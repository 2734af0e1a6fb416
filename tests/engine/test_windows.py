"""When a step is due, what the engine counts, and the batch numbers; from a DeepSpeed file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import Ranks
from support import PlainLoop, loss_of, small_model

from engine import window_cases
from engine.files import OPTIONS, assert_same, file, gradients_of, started, train, without
from longshore.engine import ConfigError
from longshore.errors import LongshoreError


class Twins:
    """An engine beside the plain loop."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.twin = engine, small_model()
        self.loop = PlainLoop(self.twin.parameters(), **OPTIONS)

    def backward(self, *batches: int) -> None:
        for number in batches:
            self.engine.backward(loss_of(self.engine, number))

    def plain(self, *batches: int, divisor: int | None = None) -> None:
        """One step on these batches, whose losses are divided by their number, or by ``divisor``."""
        self.loop.step(gradients_of(self.twin, [loss_of(self.twin, number) for number in batches], divisor=divisor))

    def check(self, when: object = "") -> None:
        assert_same(self.engine.module, self.twin, when)


@pytest.fixture
def one() -> Iterator[Twins]:
    """One backward a step."""
    with started(file()) as engine:
        yield Twins(engine)


@pytest.fixture
def two() -> Iterator[Twins]:
    """Two backwards a step."""
    with started(file(gradient_accumulation_steps=2)) as engine:
        yield Twins(engine)


def test_gradient_accumulation_steps(two: Twins) -> None:
    """``step()`` applies every second time, and losses are divided by two."""
    engine = two.engine
    for window in range(3):
        first, second = 2 * window, 2 * window + 1
        assert not engine.is_gradient_accumulation_boundary()
        two.backward(first)
        assert not engine.is_gradient_accumulation_boundary()
        engine.step()
        assert not engine.was_step_applied()
        two.check("in the window")
        assert engine.is_gradient_accumulation_boundary()
        two.backward(second)
        assert engine.is_gradient_accumulation_boundary()
        engine.step()
        assert engine.was_step_applied()
        two.plain(first, second)
        two.check(window)
        assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (window + 1, 2 * window + 2, 0)
    assert engine.gradient_accumulation_steps() == 2


@pytest.fixture
def unmanaged() -> Iterator[Twins]:
    """Every step applies, and losses are divided by two."""
    with started(file(gradient_accumulation_steps=2, managed_gradient_accumulation=False)) as engine:
        yield Twins(engine)


def test_every_step_applies_without_managed_accumulation(unmanaged: Twins) -> None:
    engine = unmanaged.engine
    for window, batches in enumerate(((0,), (1, 2), (3, 4, 5))):
        unmanaged.backward(*batches)
        assert not engine.is_gradient_accumulation_boundary()
        engine.step()
        assert engine.was_step_applied() and engine.global_steps == window + 1
        unmanaged.plain(*batches, divisor=2)
        unmanaged.check(window)
    engine.step()  # without a backward
    assert not engine.was_step_applied() and engine.global_steps == 3
    unmanaged.check()
    assert engine.gradient_accumulation_steps() == 2 and not engine.in_window


def test_a_loop_of_the_users_own_without_managed_accumulation(unmanaged: Twins) -> None:
    for number in (0, 1):
        loss_of(unmanaged.engine, number).backward()
    unmanaged.engine.step()
    unmanaged.plain(0, 1, divisor=1)
    unmanaged.check()
    with pytest.raises(LongshoreError, match="with managed_gradient_accumulation false, every step"):
        unmanaged.engine.set_gradient_accumulation_boundary(True)
    for number in range(4):
        unmanaged.backward(number)
        unmanaged.engine.zero_grad()  # no warning about a window that was not full
    unmanaged.check()


@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.slow), 1, 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_two_ranks_without_managed_accumulation(two_ranks: Ranks, stage: int) -> None:
    two_ranks(window_cases.unmanaged, stage)


def test_more_backwards_than_were_announced_are_all_applied(two: Twins) -> None:
    two.backward(0, 1, 2)
    assert two.engine.is_gradient_accumulation_boundary()
    two.engine.step()
    assert two.engine.was_step_applied() and two.engine.micro_steps == 3
    two.plain(0, 1, 2, divisor=2)
    two.check()


BATCHES = [
    # train, micro, steps as given; on one rank and on two, as they come out.
    ((8, None, None), (8, 8, 1), (8, 4, 1)),
    ((8, 2, None), (8, 2, 4), (8, 2, 2)),
    ((8, None, 2), (8, 4, 2), (8, 2, 2)),
    ((None, 3, None), (3, 3, 1), (6, 3, 1)),
    ((None, 3, 2), (6, 3, 2), (12, 3, 2)),
    ((12, 3, 4), (12, 3, 4), None),
    ((12, 3, 2), None, (12, 3, 2)),
]
NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def batch_file(given: tuple[int | None, ...]) -> dict[str, Any]:
    numbers = {name: number for name, number in zip(NAMES, given, strict=True) if number is not None}
    return {**without(file(), NAMES[1]), **numbers}


@pytest.mark.parametrize("given, one_rank, two", BATCHES)
def test_batch_numbers(
    given: tuple[int | None, ...], one_rank: tuple[int, ...] | None, two: tuple[int, ...] | None, two_ranks: Ranks
) -> None:
    """What the engine says, and after how many backwards it steps; what does not multiply out is refused."""
    config = batch_file(given)
    if one_rank is None:
        with pytest.raises(ConfigError, match=r"train_batch_size.* change "):
            window_cases.batch_numbers(config)
    else:
        assert window_cases.batch_numbers(config) == {"numbers": one_rank, "backwards": one_rank[2]}
    for found in two_ranks(window_cases.batch_numbers_or_error, config):
        if two is None:
            assert found.startswith("ConfigError") and "train_batch_size" in found and "2 ranks" in found
        else:
            assert found == {"numbers": two, "backwards": two[2]}


def test_a_boundary_is_obeyed(one: Twins) -> None:
    engine = one.engine
    for window in range(2):
        for number in range(3):
            engine.set_gradient_accumulation_boundary(number == 2)
            assert engine.is_gradient_accumulation_boundary() == (number == 2)
            one.backward(3 * window + number)
            engine.step()
            assert engine.was_step_applied() == (number == 2)
        one.plain(*range(3 * window, 3 * window + 3), divisor=1)
        one.check(window)
    # None: as if nothing had been said.
    engine.set_gradient_accumulation_boundary(None)
    one.backward(6)
    engine.step()
    one.plain(6)
    one.check("counted again")
    with pytest.raises(TypeError, match="True, False or None, not 1"):
        engine.set_gradient_accumulation_boundary(1)


def test_a_boundary_comes_before_the_configured_number(two: Twins) -> None:
    two.engine.set_gradient_accumulation_boundary(True)
    two.backward(0)
    two.engine.step()
    assert two.engine.was_step_applied()
    two.plain(0, divisor=2)
    two.check()


def test_accumulation_steps_change_between_windows_only(two: Twins) -> None:
    engine = two.engine
    engine.set_gradient_accumulation_steps(3)
    assert (engine.gradient_accumulation_steps(), engine.train_batch_size()) == (3, 3)
    two.backward(0)
    with pytest.raises(LongshoreError, match=r"from 3 to 2 in the middle of a window \(1 backwards"):
        engine.set_gradient_accumulation_steps(2)
    assert (engine.gradient_accumulation_steps(), engine.train_batch_size()) == (3, 3)
    engine.set_gradient_accumulation_steps(3)  # nothing changes
    engine.step()
    with pytest.raises(LongshoreError, match="in the middle of a window"):
        engine.set_gradient_accumulation_steps(2)
    two.backward(1, 2)
    engine.step()
    two.plain(0, 1, 2)
    two.check("three")
    engine.set_gradient_accumulation_steps(1)
    two.backward(3)
    engine.step()
    two.plain(3)
    two.check("one")
    two.backward(4)
    engine.zero_grad()
    engine.set_gradient_accumulation_steps(2)
    two.backward(5, 6)
    engine.step()
    two.plain(5, 6)
    two.check("two, after a window that was discarded")


@pytest.mark.parametrize("steps", [0, -1, True, 1.0, "2", None])
def test_what_is_no_number_of_backwards_is_refused(steps: Any, one: Twins) -> None:
    with pytest.raises(ValueError, match="gradient_accumulation_steps is a number of backwards, at least 1"):
        one.engine.set_gradient_accumulation_steps(steps)
    assert one.engine.gradient_accumulation_steps() == 1


def test_the_train_batch_size_changes_the_accumulation() -> None:
    with started(file(train_micro_batch_size_per_gpu=4)) as engine:
        engine.set_train_batch_size(12)
        assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (12, 4)
        assert engine.gradient_accumulation_steps() == 3
        with pytest.raises(ValueError, match=r"13 is not a multiple of 4 .*; 12 and 16 are"):
            engine.set_train_batch_size(13)
        for size in (3, 0, True, 8.0):
            with pytest.raises(ValueError, match="train_batch_size is a multiple of 4"):
                engine.set_train_batch_size(size)
        assert engine.train_batch_size() == 12
        train(engine, [loss_of(engine, 0)])
        with pytest.raises(LongshoreError, match="in the middle of a window"):
            engine.set_train_batch_size(8)
        assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (12, 3)
        assert engine.global_samples == 4


def test_raw_backwards_that_nobody_can_count(two: Twins) -> None:
    """An error that says how to choose; having chosen, nothing was lost."""
    loss_of(two.engine, 0).backward()
    with pytest.raises(LongshoreError, match=r"gradient_accumulation_steps is 2: .*set_gradient_accumulation_boundary"):
        two.engine.step()
    two.check("nothing was stepped")
    two.engine.set_gradient_accumulation_boundary(False)
    two.engine.step()
    assert not two.engine.was_step_applied()
    loss_of(two.engine, 1).backward()
    two.engine.set_gradient_accumulation_boundary(True)
    two.engine.step()
    assert two.engine.was_step_applied()
    two.plain(0, 1, divisor=1)
    two.check()


def test_a_raw_backward_among_the_engines(two: Twins) -> None:
    two.backward(0)
    loss_of(two.engine, 1).backward()
    with pytest.raises(LongshoreError, match="the engine does not count"):
        two.engine.step()
    two.engine.zero_grad()
    two.backward(2, 3)
    two.engine.step()
    two.plain(2, 3)
    two.check("what was discarded left nothing")


def test_a_raw_backward_with_one_a_step_is_applied(one: Twins) -> None:
    loss_of(one.engine, 0).backward()
    one.engine.step()
    assert one.engine.was_step_applied() and one.engine.micro_steps == 0
    one.plain(0)
    one.check()


def test_zero_grad_discards_the_window(two: Twins) -> None:
    two.backward(0)
    two.engine.step()
    two.engine.zero_grad()
    assert not two.engine.is_gradient_accumulation_boundary()
    for number in (1, 2):
        two.backward(number)
        two.engine.step()
    assert two.engine.was_step_applied() and two.engine.global_steps == 1
    two.plain(1, 2)
    two.check()


def test_what_backward_takes_and_gives(two: Twins) -> None:
    loss = loss_of(two.engine, 0)
    assert torch.equal(two.engine.backward(loss, retain_graph=True), loss / 2)
    assert torch.equal(two.engine.backward(loss, scale_wrt_gas=False), loss)
    two.engine.step()
    two.loop.step([gradient * 0.5 + gradient for gradient in gradients_of(two.twin, [loss_of(two.twin, 0)])])
    two.check()
    with pytest.raises(ValueError, match=r"a loss of one element, not \[5, 7\]"):
        two.engine.backward(two.engine(torch.zeros(5, 19)))
    with pytest.raises(ValueError, match="a loss of one element, not float"):
        two.engine.backward(1.0)
    assert two.engine.micro_steps == 2


def test_a_step_that_is_not_due_does_not_move_the_schedule() -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1.0, "warmup_type": "linear"}}
    with started(file(gradient_accumulation_steps=2, scheduler=schedule)) as engine:
        rates = []
        for number in range(6):
            train(engine, [loss_of(engine, number)])
            rates += engine.get_lr()
    assert rates == [0, 0, 0, 0.25, 0.25, 0.5]


@pytest.mark.covering(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("before", ["step", "norm"])
@pytest.mark.parametrize("raw", [False, True])
def test_one_rank_without_a_gradient(stage: int, before: str, raw: bool, two_ranks: Ranks) -> None:
    """After a step() that had nothing to apply, and after the norm was measured in the middle of a window."""
    two_ranks(window_cases.one_rank_without_a_gradient, stage, before, raw)


@pytest.mark.parametrize("stage, raises", [(2, 0), (2, 1), (2, 2), (3, 2)])
def test_after_a_raw_backward_that_raised(stage: int, raises: int, two_ranks: Ranks) -> None:
    two_ranks(window_cases.after_a_raw_backward_that_raised, stage, raises)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_parameter_without_elements_that_one_rank_used(stage: int, two_ranks: Ranks) -> None:
    assert two_ranks(window_cases.an_empty_parameter_of_one_rank, stage) == [2, 2]


@pytest.mark.quick(0)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_that_was_taken_out_of_its_group(stage: int, two_ranks: Ranks) -> None:
    two_ranks(window_cases.taken_out, stage)


@pytest.mark.quick(0)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_that_were_moved_to_a_new_group(stage: int, two_ranks: Ranks) -> None:
    two_ranks(window_cases.moved, stage)

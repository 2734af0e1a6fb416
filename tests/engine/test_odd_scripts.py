"""What odd scripts do to an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import nn

import longshore
from engine import failure_cases
from longshore.errors import CheckpointError
from longshore.optim.tiled_optimizer import core_of
from longshore.tiles import Ended


def make(**arguments: Any) -> Any:
    model = nn.Linear(16, 4)
    config = longshore.Config(optimizer=None if "optimizer" in arguments else {"type": "AdamW", "lr": 1e-3})
    if "optimizer" in arguments:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        arguments = {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)}
    return longshore.initialize(model=model, config=config, **arguments).engine


def test_a_step_without_a_backward_is_not_applied() -> None:
    engine = make(lr_scheduler=lambda made: torch.optim.lr_scheduler.StepLR(made, 1, 0.1))
    try:
        engine.step()
        assert not engine.was_step_applied() and engine.global_steps == 0
        assert engine.get_lr() == [1e-3]
    finally:
        engine.destroy()


def test_after_a_step_without_a_backward_a_checkpoint_is_saved_and_loaded(tmp_path: Path) -> None:
    engine = make()
    try:
        engine.step()
        engine.save_checkpoint(tmp_path)
        engine.step()
        engine.load_checkpoint(tmp_path)
        engine.set_gradient_accumulation_steps(2)
        engine.step()
        with pytest.raises(CheckpointError, match="window under way"):  # it is the first of two
            engine.save_checkpoint(tmp_path)
    finally:
        engine.destroy()


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    """A wrong path would begin training anew, unnoticed; DeepSpeed's door answers as DeepSpeed does."""
    engine = make()
    try:
        with pytest.raises(
            longshore.NoCheckpointError, match="has no checkpoint, and nothing was loaded: check the path"
        ):
            engine.load_checkpoint(tmp_path / "elsewhere")
        with pytest.raises(longshore.NoCheckpointError, match="has no checkpoint"):
            longshore.load(tmp_path, nn.Linear(2, 2))
        engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
        assert engine.load_checkpoint(tmp_path)[1] == {"epoch": 3}
    finally:
        engine.destroy()


def test_a_scheduler_of_the_clients_optimizer_does_not_warn() -> None:
    engine = make(optimizer=True)
    try:
        engine.backward(engine(torch.randn(3, 16)).sum())
        engine.step()  # warnings are errors here
    finally:
        engine.destroy()


def test_schedulers_inside_a_scheduler_drive_our_optimizer() -> None:
    model = nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2), torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)]
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [1])
    engine = longshore.initialize(
        model=model, config=longshore.Config(), optimizer=optimizer, lr_scheduler=schedule
    ).engine
    try:
        rates = []
        for _ in range(3):
            engine.backward(engine(torch.randn(3, 16)).sum())
            engine.step()
            rates += engine.get_lr()
        assert rates == pytest.approx([1e-3, 1e-4, 1e-5])
    finally:
        engine.destroy()


def test_a_step_of_the_optimizer_itself_ends_the_window() -> None:
    config = longshore.Config(optimizer={"type": "AdamW"}, gradient_accumulation_steps=2)
    engine = longshore.initialize(model=nn.Linear(16, 4), config=config).engine
    try:
        for _ in range(2):
            engine.backward(engine(torch.randn(3, 16)).sum())
        engine.optimizer.step()
        engine.backward(engine(torch.randn(3, 16)).sum())
        engine.step()
        assert not engine.was_step_applied()
    finally:
        engine.destroy()


@pytest.mark.parametrize("what", ["model", "configuration", "choice of trainable parameters"])
def test_ranks_that_are_set_up_differently(what: str, two_ranks: Ranks) -> None:
    for said in two_ranks(failure_cases.other_setup, what):
        assert said.startswith(f"RankError: the {what} of rank 1 is not that of rank 0")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_learning_rates_that_differ_are_found_before_any_step(stage: int, two_ranks: Ranks) -> None:
    for said in two_ranks(failure_cases.other_learning_rate, stage):
        assert said.startswith("RankError: the ranks are about to step differently")


def test_gradients_of_an_earlier_loop_do_not_count() -> None:
    model = nn.Linear(16, 4)
    x = torch.randn(3, 16)
    model(x).sum().backward()
    with pytest.warns(UserWarning, match="discarded the gradients that 2 parameters still had"):
        engine = longshore.initialize(model=model, config=longshore.Config(optimizer={"type": "AdamW"})).engine
    try:
        engine.backward(engine(x).sum())
        engine.step()
        assert [entry.arrived for entry in engine.explain(False).parameters] == [1, 1]
        assert [entry.reduced for entry in engine.explain(False).parameters] == [1, 1]
    finally:
        engine.destroy()


@pytest.mark.parametrize("by_optimizer", [False, True])
def test_a_loop_that_discards_in_every_micro_step_is_warned(by_optimizer: bool) -> None:
    config = longshore.Config(optimizer={"type": "AdamW"}, gradient_accumulation_steps=4)
    engine = longshore.initialize(model=nn.Linear(16, 4), config=config).engine
    try:
        engine.zero_grad()  # there is nothing yet
        for _ in range(2):  # warnings are errors here
            engine.backward(engine(torch.randn(3, 16)).sum())
            engine.step()
            (engine.optimizer if by_optimizer else engine).zero_grad()
        engine.backward(engine(torch.randn(3, 16)).sum())
        engine.step()
        with pytest.warns(UserWarning, match="discarded 1 of 4 backwards") as told:
            (engine.optimizer if by_optimizer else engine).zero_grad()
        assert told[0].filename == __file__
        for _ in range(4):
            engine.backward(engine(torch.randn(3, 16)).sum())
            engine.step()
        assert engine.was_step_applied()
        engine.zero_grad()
    finally:
        engine.destroy()


def test_destroy_is_no_discard_to_warn_of() -> None:
    """Warnings are errors here: one would leave the threads, and the memory of the state."""
    config = longshore.Config(optimizer={"type": "AdamW"}, gradient_accumulation_steps=2)
    engine = longshore.initialize(model=nn.Linear(16, 4), config=config).engine
    for _ in range(2):
        engine.backward(engine(torch.randn(3, 16)).sum())
        engine.step()
        engine.zero_grad()
    engine.backward(engine(torch.randn(3, 16)).sum())
    engine.destroy()
    assert sum(engine.optimizer.host_bytes().values()) == 0 and not engine.in_window


def test_destroy_ends_each_part_whatever_another_one_raises() -> None:
    class Raising:
        def ended(self, how: Ended) -> None:
            raise RuntimeError("at the end of the window")

    engine, raising = make(), Raising()
    engine.backward(engine(torch.randn(3, 16)).sum())
    core_of(engine.optimizer).window.on_end(raising.ended)
    assert sum(engine.optimizer.host_bytes().values()) > 0
    with pytest.raises(RuntimeError, match="at the end of the window"):
        engine.destroy()
    assert sum(engine.optimizer.host_bytes().values()) == 0 and not engine.in_window


@pytest.mark.parametrize("steps", [1, 2])
def test_a_failed_backward_counts_although_the_model_is_converted_after_it(steps: int) -> None:
    config = longshore.Config(optimizer={"type": "AdamW"}, gradient_accumulation_steps=steps)
    engine = longshore.initialize(model=nn.Linear(16, 4), config=config).engine
    try:
        loss = engine(torch.randn(3, 16)).sum()
        loss.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.backward(loss)
        for parameter in engine.module.parameters():
            parameter.data = parameter.data.bfloat16()
        for _ in range(2):
            engine.backward(engine(torch.randn(3, 16, dtype=torch.bfloat16)).sum())
            with pytest.raises(longshore.GradientError, match="a backward of this window failed"):
                engine.step()
        engine.zero_grad()
        for _ in range(steps):
            engine.backward(engine(torch.randn(3, 16, dtype=torch.bfloat16)).sum())
            engine.step()
        assert engine.was_step_applied()
    finally:
        engine.destroy()


def test_a_loop_that_discards_before_each_step_is_warned_once() -> None:
    engine = make()
    try:
        for _ in range(3):  # warnings are errors here
            engine.backward(engine(torch.randn(3, 16)).sum())
            engine.zero_grad()
            engine.step()
        engine.backward(engine(torch.randn(3, 16)).sum())
        with pytest.warns(UserWarning, match="discarded 1 of 1 backwards"):
            engine.zero_grad()
        for _ in range(2):
            engine.step()
            engine.backward(engine(torch.randn(3, 16)).sum())
            engine.zero_grad()
    finally:
        engine.destroy()


def test_bad_batches_may_be_discarded() -> None:
    engine = make()
    try:
        for _ in range(3):  # warnings are errors here
            for _ in range(2):
                engine.backward(engine(torch.randn(3, 16)).sum())
                engine.zero_grad()
            engine.backward(engine(torch.randn(3, 16)).sum())
            engine.step()
        assert engine.global_steps == 3
    finally:
        engine.destroy()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_losses_that_are_no_numbers_are_told_once(value: float, accumulation: int) -> None:
    config = longshore.Config(optimizer={"type": "SGD", "lr": 0.0}, gradient_accumulation_steps=accumulation)
    engine = longshore.initialize(model=nn.Linear(16, 4), config=config).engine

    def step(factor: float) -> None:
        """The first backward of the window has a loss with this factor, without gradients that are no numbers."""
        for place in range(accumulation):
            loss = engine(torch.randn(3, 16)).sum()
            engine.backward(loss if place else loss + torch.tensor(factor))
        engine.step()

    try:
        for factor in (1.0, value, value, 1.0, value, value):  # warnings are errors here
            step(factor)
        with pytest.warns(UserWarning, match="the loss was not a finite number in 3 steps in a row"):
            step(value)
        assert engine.global_steps == 7
        step(value)
    finally:
        engine.destroy()

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import nn

import longshore
from compat.engine_cases import emptied_cache, started, train, whole_weights
from longshore.compat.engine import INSTEAD


@pytest.fixture
def engine() -> Iterator[Any]:
    made = started(2)
    yield made
    made.destroy()


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_whole_weights_of_two_ranks(two_ranks: Ranks, tmp_path: Path, stage: int) -> None:
    two_ranks(whole_weights, stage, str(tmp_path))


def test_whole_weights_of_one_rank(tmp_path: Path) -> None:
    whole_weights(2, str(tmp_path))


def test_numbers(engine: Any) -> None:
    info = engine.get_batch_info()
    assert info == (2, 2, 1) and info.train_micro_batch_size_per_gpu == engine.train_micro_batch_size_per_gpu()
    engine.set_train_micro_batch_size(6)
    assert tuple(engine.get_batch_info()) == (6, 6, 1)
    engine.set_gradient_accumulation_steps(2)
    assert engine.train_batch_size() == 12
    with pytest.raises(ValueError, match="at least 1, not 0"):
        engine.set_train_micro_batch_size(0)
    assert (engine.dp_world_size, engine.mp_world_size, engine.data_parallel_group) == (1, 1, None)
    assert engine.get_data_types() == (torch.bfloat16, torch.float32)
    assert engine.communication_data_type == torch.bfloat16
    assert (engine.optimizer_name(), engine.scheduler_name(), engine.scheduler_params()) == ("adamw", None, None)
    assert engine.optimizer_params()["lr"] == 1e-2
    assert engine.zero_optimization() and engine.zero_optimization_partition_gradients()
    assert not engine.zero_optimization_partition_weights()
    assert engine.zero_cpu_offload() is (engine.config.offload_device == "cpu")
    assert engine.gradient_clipping() == 0.0 and engine.config.gradient_clipping is None
    assert not engine.wall_clock_breakdown() and engine.gradient_predivide_factor() == 1.0


def test_the_loss_scale_may_be_called(engine: Any) -> None:
    assert engine.loss_scale() == engine.loss_scale == engine.cur_scale == 1.0


def test_an_optimizer_that_was_passed_has_the_name_of_its_class() -> None:
    model = nn.Linear(2, 2)
    config = longshore.Config(micro_batch_size=1)
    engine = longshore.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config).engine
    try:
        assert engine.optimizer_name() == "SGD" and engine.optimizer_params() is None
    finally:
        engine.destroy()


def test_the_optimizer_knows_the_loss_scale_and_the_last_overflow() -> None:
    config = longshore.Config(
        micro_batch_size=1,
        dtype="fp16",
        loss_scaling={"initial_scale_power": 4, "hysteresis": 1},
        optimizer={"type": "AdamW"},
    )
    engine, optimizer, *_ = longshore.initialize(model=nn.Linear(2, 2), config=config)
    mine: Any = optimizer
    try:
        assert (mine.cur_scale, mine.loss_scale, mine.dynamic_loss_scale, mine.overflow) == (16.0, 16.0, True, False)
        for factor, scale, overflow in ((float("inf"), 8.0, True), (1.0, 8.0, False), (float("nan"), 4.0, True)):
            engine.backward((engine(torch.ones(1, 2).half()).float() * factor).sum())
            engine.step()
            assert (mine.cur_scale, mine.loss_scale, mine.overflow) == (scale, scale, overflow)
            assert engine.was_step_applied() is not overflow and engine.loss_scale() == scale
    finally:
        engine.destroy()


def test_without_loss_scaling_the_scale_is_one(engine: Any) -> None:
    optimizer = engine.optimizer
    train(engine)
    found = (optimizer.cur_scale, optimizer.loss_scale, optimizer.dynamic_loss_scale, optimizer.overflow)
    assert found == (1.0, 1.0, False, False)


@pytest.mark.parametrize("kind", [ValueError, AssertionError])  # the latter as in DeepSpeed
def test_losses_have_one_element(engine: Any, kind: type[Exception]) -> None:
    for call in (engine.scale, engine.backward):
        with pytest.raises(kind, match=rf"engine\.{call.__name__}\(\) takes a loss of one element, not \[3\]"):
            call(torch.ones(3, requires_grad=True))
    assert not engine.in_window


@pytest.mark.parametrize("folder", [None, ""])
def test_a_checkpoint_needs_a_folder(engine: Any, folder: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="save_checkpoint\\(\\) takes a folder, not"):
        engine.save_checkpoint(folder)
    assert not [*tmp_path.iterdir()]


@pytest.mark.needs_torch("stage 3")
def test_the_cache_of_stage_3_is_emptied(two_ranks: Ranks) -> None:
    two_ranks(emptied_cache)


def test_where_nothing_is_gathered_emptying_does_nothing(engine: Any) -> None:
    before = {name: each.detach().clone() for name, each in engine.module.named_parameters()}
    engine.empty_partition_cache()
    assert all(torch.equal(each, before[name]) for name, each in engine.module.named_parameters())


def test_the_engine_is_asked_as_if_it_were_the_model(engine: Any) -> None:
    tokens = torch.arange(4).view(2, 2)
    assert torch.equal(engine.generate(tokens), engine.module.generate(tokens))
    assert engine.blocks is engine.module.blocks
    assert hasattr(engine, "generate") and not hasattr(engine, "nothing")
    # Both have one, and the engine's comes first.
    assert isinstance(engine.config, longshore.Config)


@pytest.mark.parametrize("name", INSTEAD)
def test_calls_that_are_not_there_say_what_to_do(engine: Any, name: str) -> None:
    assert not hasattr(engine, name)
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; ..."):
        getattr(engine, name)


def test_any_other_name_says_where_settings_and_calls_are(engine: Any) -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'zero_overlap_comm'; settings are in engine\.config"):
        _ = engine.zero_overlap_comm


def test_arguments_of_the_schedule() -> None:
    model = nn.Linear(2, 2)
    given: list[Any] = []

    class Schedule:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def step(self, metric: float = 0.0) -> None:
            given.append(metric)

    config = longshore.Config(micro_batch_size=1, optimizer={"type": "AdamW"})
    engine = longshore.initialize(model=model, config=config, lr_scheduler=Schedule).engine
    try:
        for metric in (None, {"metric": 2.0}):
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step(metric)
    finally:
        engine.destroy()
    assert given == [0.0, 2.0]


def test_loaders(engine: Any) -> None:
    data = list(range(7))
    assert [batch.tolist() for batch in engine.deepspeed_io(data, route="eval")] == [[0, 1], [2, 3], [4, 5], [6]]
    shuffled = [batch.tolist() for batch in engine.deepspeed_io(data, batch_size=7)]
    assert shuffled != [data] and sorted(shuffled[0]) == data
    with pytest.raises(ValueError, match="sampler of your own"):
        engine.deepspeed_io(data, data_sampler=object())
    with pytest.raises(ValueError, match="'predict', not 'test'"):
        engine.deepspeed_io(data, route="test")


def test_custom_load(engine: Any) -> None:
    taken = []
    engine.load_module_state_dict({"a": 1}, custom_load_fn=lambda src, dst: taken.append((src, dst)))
    assert taken == [({"a": 1}, engine.module)]


def test_compile(engine: Any) -> None:
    assert not engine.is_compiled
    engine.compile(backend="eager", compile_kwargs={"dynamic": False})
    assert engine.is_compiled
    train(engine)
    assert engine.was_step_applied()


def test_what_an_engine_answers_may_be_wrapped(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("loss_scale", "global_rank", "is_compiled", "get_batch_info"):
        with pytest.raises(AttributeError, match=f"engine.{name} cannot be assigned"):
            setattr(engine, name, 3)
        with monkeypatch.context() as patch:
            patch.setattr(engine, name, lambda: 4.0)
            assert getattr(engine, name)() == 4.0
    assert engine.loss_scale() == 1.0 and engine.global_rank == 0

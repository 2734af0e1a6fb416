"""Scripts that do what they should not, or what nobody thought of: the weights stay right, or it is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks

import longshore
from engine import hostile_cases
from engine.failure_cases import OPTIONS, backward, explode, raised_by
from engine.scenarios import HEADS, inputs, make_model


def engine_of(**config: Any) -> Any:
    settings = longshore.Config(optimizer={"type": "AdamW", **OPTIONS}, **config)
    return longshore.initialize(model=make_model(torch.float32), config=settings).engine


@pytest.mark.parametrize("slow", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_users_own_collectives_between_backward_and_step(slow: int, two_ranks: Ranks) -> None:
    assert two_ranks(hostile_cases.collectives_of_the_users_own, 2, slow) == [[3.0] * 4] * 2


@pytest.mark.parametrize("stage", [0, 2])
def test_two_engines_at_work_at_once(stage: int, two_ranks: Ranks) -> None:
    first, second = two_ranks(hostile_cases.two_engines, stage)
    assert first == second


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_in_another_order_on_one_rank_are_refused(stage: int, two_ranks: Ranks) -> None:
    for said in two_ranks(hostile_cases.parameters_in_another_order, stage):
        assert said.startswith("RankError: the order of the optimizer's parameters of rank 1 is not that of rank 0")


@pytest.mark.parametrize("stage", [1, 2])
def test_backwards_inside_no_sync_take_the_memory_of_one(stage: int, two_ranks: Ranks) -> None:
    assert two_ranks(hostile_cases.unsynchronized, stage) == [1, 1]


def test_an_expanded_buffer_becomes_rank_0s(two_ranks: Ranks) -> None:
    assert two_ranks(hostile_cases.expanded_buffer) == [[20.0], [20.0]]


@pytest.mark.medium
def test_a_collective_in_backward_while_a_head_is_idle_on_one_rank(two_ranks: Ranks) -> None:
    for seconds in two_ranks(hostile_cases.collective_in_backward, 1):
        assert seconds < 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_thawed_parameter_accumulates_like_the_others(dtype: torch.dtype, two_ranks: Ranks) -> None:
    assert two_ranks(hostile_cases.thawed, 2, dtype, 3) == [[], []]


def test_an_unseen_write_in_one_ranks_shard_stops_all(two_ranks: Ranks) -> None:
    first, second = two_ranks(hostile_cases.unseen_write_in_one_shard)
    assert "first.weight" in first[0]
    assert second[0]
    assert first[1] == second[1] == ""


@pytest.mark.parametrize("config", [{"gradient_clipping": 1e-3}, {"loss_scaling": {}}], ids=["clipping", "loss scale"])
def test_the_optimizers_own_step_does_not_leave_out_what_the_engine_would_do(config: dict[str, Any]) -> None:
    engine = engine_of(**config)
    before = [parameter.detach().clone() for parameter in engine.module.parameters()]
    backward(engine, 0, 0)
    assert "engine.step()" in raised_by(engine.optimizer.step)
    for parameter, old in zip(engine.module.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
    engine.step()
    assert engine.was_step_applied()


def test_the_optimizers_zero_grad_ends_the_engines_window() -> None:
    engine = engine_of(gradient_accumulation_steps=2)
    backward(engine, 0, 0)
    engine.optimizer.zero_grad()
    backward(engine, 1, 0)
    engine.step()
    assert not engine.was_step_applied()
    assert raised_by(lambda: explode(engine, 2, 0))
    engine.optimizer.zero_grad()
    backward(engine, 3, 0)
    engine.step()
    assert not engine.was_step_applied()
    backward(engine, 4, 0)
    engine.step()
    assert engine.was_step_applied()


def test_a_raw_backward_without_the_loss_scale_is_found_after_the_optimizers_zero_grad() -> None:
    engine = engine_of(loss_scaling={"scale": 8.0})
    backward(engine, 0, 0)
    engine.optimizer.zero_grad()
    engine(inputs(0, 0, 0, torch.float32), HEADS).backward()
    assert "without the loss scale" in raised_by(engine.step)


def test_a_destroyed_engine_says_so() -> None:
    engine = engine_of()
    engine.destroy()
    engine.destroy()
    assert "destroy" in raised_by(lambda: backward(engine, 0, 0))
    assert "destroy" in raised_by(engine.step)


def test_a_schedule_that_needs_a_measurement_is_refused() -> None:
    with pytest.raises(ValueError, match="ReduceLROnPlateau"):
        longshore.initialize(
            model=make_model(torch.float32),
            config=longshore.Config(optimizer={"type": "AdamW", **OPTIONS}),
            lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau,
        )


def test_a_group_added_without_names_is_taken() -> None:
    model = make_model(torch.float32)
    rest = [parameter for name, parameter in model.named_parameters() if "second" not in name]
    config = longshore.Config(optimizer={"type": "AdamW", **OPTIONS})
    engine = longshore.initialize(model=model, model_parameters=rest, config=config).engine
    engine.optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 1e-3})

"""What a script may keep after ``initialize()``: optimizer, groups, state, schedule, model, parameters, configuration
and loader. A change to each counts at the next step, as in plain PyTorch, or is an error."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import Ranks
from support import loss_of, small_model

import longshore
from engine import kept_cases
from engine.files import file, started, train
from longshore.errors import LongshoreError


@pytest.mark.quick(0)
@pytest.mark.parametrize("name", kept_cases.CHANGES)
def test_on_one_rank(name: str) -> None:
    kept_cases.check(name, stage=2)


@pytest.mark.medium
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_on_two_ranks(stage: int, two_ranks: Ranks) -> None:
    for name in kept_cases.CHANGES:
        two_ranks(kept_cases.check, name, stage)


@pytest.mark.needs_torch("stage 3")
def test_a_shard_keeps_its_memory(two_ranks: Ranks) -> None:
    two_ranks(kept_cases.check, "parameters: data assigned", 3)


def test_a_configuration_that_was_changed_is_an_error_until_it_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = file(notes={"run": 1})
    monkeypatch.setenv("LONGSHORE_UNKNOWN_KEYS", "warn")
    with pytest.warns(UserWarning, match="notes"):
        engine = longshore.initialize(model=small_model(), config=config).engine
    config["notes"]["run"] = 2
    train(engine, [loss_of(engine, 0)])  # longshore does not know that key
    engine.backward(loss_of(engine, 1))
    config["optimizer"]["params"]["lr"] = 1.0
    del config["gradient_clipping"]
    for step in (engine.step, engine.optimizer.step):
        with pytest.raises(LongshoreError) as caught:
            step()
        assert "gradient_clipping was 0.0 and is not given" in str(caught.value)
        assert "optimizer.params.lr was 0.002 and is 1.0" in str(caught.value)
    config["optimizer"]["params"]["lr"], config["gradient_clipping"] = 2e-3, 0.0
    engine.step()
    assert engine.was_step_applied()
    engine.destroy()


def test_a_configuration_may_be_changed_for_another_engine() -> None:
    config: dict[str, Any] = file()
    with started(config) as first:
        train(first, [loss_of(first, 0)])
        config["optimizer"]["params"]["lr"] = 1.0
        with started(config) as second:
            for engine in (first, second):
                train(engine, [loss_of(engine, 1)])
            assert (first.get_lr(), second.get_lr()) == ([2e-3], [1.0])
            config["gradient_clipping"] = 1.0
            train(first, [loss_of(first, 2)])
            second.backward(loss_of(second, 2))
            with pytest.raises(LongshoreError, match=r"gradient_clipping was 0\.0 and is 1\.0"):
                second.step()


def test_samples_that_are_added_to_the_data_are_read() -> None:
    data = list(range(4))
    with started(file(), training_data=data) as engine:
        assert sorted(int(each) for each in engine.training_dataloader) == data
        data += [4, 5]
        assert sorted(int(each) for each in engine.training_dataloader) == data
        assert len(engine.training_dataloader) == 6
        del data[1:]
        assert [int(each) for each in engine.training_dataloader] == data

"""Stepping ahead, as a configuration asks for it; the weights are in test_table.py."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import Ranks
from support import loss_of, small_model

import longshore
from engine import speculation_cases
from engine.files import assert_same, file, started, train
from longshore.engine import ConfigError
from longshore.engine.config import load_config

AHEAD = {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": True}}


def trained(content: dict[str, Any], steps: int = 5) -> tuple[Any, Any]:
    with started(content) as engine:
        for step in range(steps):
            train(engine, [loss_of(engine, step)])
        return engine.module, engine.explain(print_it=False).speculation


def test_super_offload() -> None:
    """One key turns it on, clipping stays on, and no bit changes."""
    model, record = trained(file(zero_optimization=AHEAD, gradient_clipping=1e9))
    plain, nothing = trained(file(gradient_clipping=1e9))
    assert record.kept == record.begun > 0 and nothing is None
    assert_same(model, plain)


def test_super_offload_where_clipping_acts() -> None:
    model, record = trained(file(zero_optimization=AHEAD, gradient_clipping=1e-3), steps=8)
    plain, _ = trained(file(gradient_clipping=1e-3), steps=8)
    assert not record.bets and record.begun == 0
    assert_same(model, plain)


@pytest.mark.parametrize(("memory", "spares"), [("auto", 1), (1, 1), (1.0, 1), (1 << 30, 1), (100, 0)])
def test_the_setting_of_the_file(memory: Any, spares: int) -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    _, record = trained(file(zero_optimization=zero, longshore={"speculation_memory": memory}))
    assert record.spares == spares


def test_without_it_nothing_is_stepped_ahead() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": False}}
    assert trained(file(zero_optimization=zero))[1] is None
    assert trained(file(zero_optimization=AHEAD, longshore={"speculation_memory": 0}))[1] is None


@pytest.mark.parametrize("value", ["all", -1, 1.5, True, [1]])
def test_wrong_values(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"longshore\.speculation_memory"):
        load_config(file(longshore={"speculation_memory": value}))


def test_it_needs_the_state_on_the_host() -> None:
    with pytest.raises(
        ConfigError,
        match=r"super_offload.* must agree with zero_optimization\.offload_optimizer\.device, which is none",
    ):
        load_config(file(zero_optimization={"stage": 2, "offload_optimizer": {"super_offload": True}}))


def test_a_stage_that_reduces_in_step_says_so() -> None:
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu", "super_offload": True}}
    assert any(
        "stages 0 and 1 reduce gradients in step()" in note for note in load_config(file(zero_optimization=zero)).notes
    )
    assert not any("step during backward" in note for note in load_config(file(zero_optimization=AHEAD)).notes)


def test_the_page_says_what_was_stepped_ahead(capsys: pytest.CaptureFixture[str]) -> None:
    with started(file(zero_optimization=AHEAD)) as engine:
        for step in range(3):
            train(engine, [loss_of(engine, step)])
        engine.explain()
    assert "stepped ahead: 10 tiles, 10 kept" in capsys.readouterr().out


def test_announced_accumulation_is_expected() -> None:
    """From 1 to 3 backwards a step: the first window of three is bet on its last backward."""
    model = small_model()
    offload = longshore.Offload(speculation_memory=1.0)
    with started(file(gradient_clipping=0.0), model, offload=offload) as engine:
        for step in range(3):
            train(engine, [loss_of(engine, step)])
        engine.set_gradient_accumulation_steps(3)
        for micro in range(3):
            engine.backward(loss_of(engine, micro))
            engine.step()
        record = engine.optimizer.speculation
    assert (record.begun, record.kept) == (1, 1)


def test_ranks_of_one_machine_share_what_auto_grants(two_ranks: Ranks) -> None:
    assert two_ranks(speculation_cases.granted, 1000) == [500, 500]

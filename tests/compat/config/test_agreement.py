"""A file and the arguments of the program around it."""

from __future__ import annotations

from typing import Any

import pytest

from longshore.compat.config.agreement import ArgumentValue, settle, settle_config
from longshore.engine.config import AdamWConfig, Config

STAGE = ArgumentValue("zero_optimization.stage", 2, "--stage 2", "change one")
LR = ArgumentValue("optimizer.params.lr", 0.1, "--lr 0.1", "change one", fills=False)


@pytest.mark.parametrize("file", [{}, {"zero_optimization": None}, {"zero_optimization": {"stage": "auto"}}])
def test_an_argument_fills_what_is_open(file: dict[str, Any]) -> None:
    assert settle(file, [STAGE]) == []
    assert file == {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize("file", [{"zero_optimization": {"stage": 2}}, {"zero_optimization": 3}])
def test_what_is_given_stays(file: dict[str, Any]) -> None:
    before = dict(file)
    assert settle(file, [STAGE, LR]) == []
    assert file == before


def test_a_contradiction_shows_both() -> None:
    (problem,) = settle({"zero_optimization": {"stage": 1}}, [STAGE])
    assert str(problem) == "zero_optimization.stage = 1: contradicts --stage 2; change one"
    fields, (problem,) = settle_config(Config(stage=1, optimizer=AdamWConfig()), [STAGE, LR])
    assert str(problem) == "stage = 1: contradicts --stage 2; change one"
    assert fields == {"optimizer": AdamWConfig(lr=0.1)}

"""The table that must hold, with the model on an accelerator."""

from __future__ import annotations

import itertools

import pytest
from on_device import runs_triton
from ranks import Ranks

from engine import cases
from engine.scenarios import SCENARIOS
from engine.test_table import LONG

pytestmark = pytest.mark.gpu

COLUMNS = {
    "scenario": [name for name in SCENARIOS if name != LONG],
    "dtype": list(cases.DTYPES),
    "ahead": list(cases.AHEAD),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize(tuple(COLUMNS), list(itertools.product(*COLUMNS.values())))
def test_one_rank(scenario: str, dtype: str, ahead: str) -> None:
    result = cases.run(scenario, 0, "device", "small", dtype, ahead, 1)
    assert result["steps"] == SCENARIOS[scenario].steps


TWO_RANKS = {**COLUMNS, "stage": [0, 1, 2, 3], "place": ["device", "device split"] if runs_triton() else ["device"]}


@pytest.mark.covering(1)
@pytest.mark.parametrize(tuple(TWO_RANKS), list(itertools.product(*TWO_RANKS.values())))
def test_two_ranks(scenario: str, dtype: str, ahead: str, stage: int, place: str, two_devices: Ranks) -> None:
    for result in two_devices(cases.run, scenario, stage, place, "small", dtype, ahead, 2):
        assert result["steps"] == SCENARIOS[scenario].steps


@pytest.mark.parametrize("stage", [0, 3])
def test_collectives_are_called_on_the_device_of_their_rank(stage: int, two_devices: Ranks) -> None:
    assert two_devices(cases.device_of_collectives, stage) == [0, 1]

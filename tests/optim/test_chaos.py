"""Random schedules; ``make test-chaos`` plays 10,000 of them, and a failing seed replays."""

from __future__ import annotations

from collections import Counter

import pytest
from chaos import Schedule

_AT_A_TIME = 50


def play(first: int, count: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            seen.update(Schedule(seed).play())
        except Exception as failure:
            raise AssertionError(
                f"replay with: pytest tests/optim/test_chaos.py -m chaos --first-seed {seed} --seeds 1"
            ) from failure
    return seen


@pytest.mark.medium
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(_AT_A_TIME, 100, _AT_A_TIME))]
)
def test_a_hundred_schedules(first: int) -> None:
    seen = play(first, _AT_A_TIME)
    # They do what they are there for.
    done = ("kept", "redone", "dropped", "waited", "discarded", "taken out", "written", "frozen or thawed")
    for what in (*done, "fp32", "bf16", "8bit"):
        assert seen[what] > 0, what


@pytest.mark.full
@pytest.mark.chaos
@pytest.mark.parametrize("part", range(2))
def test_chosen_schedules(part: int, request: pytest.FixtureRequest) -> None:
    """``--seeds`` of them, in two parts."""
    first, count = request.config.getoption("--first-seed"), request.config.getoption("--seeds")
    mine = (count + 1 - part) // 2
    assert play(first + part * (count - mine), mine)["stepped"] == 7 * mine

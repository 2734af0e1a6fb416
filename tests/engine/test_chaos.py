"""Random schedules on two ranks, with states of every format.

``make test-chaos`` plays thousands of them, and a failing seed replays.
"""

from __future__ import annotations

from collections import Counter

import pytest
from ranks import Ranks

from engine import chaos_cases

_FEW = 8
"""At a time in the quick suite."""


def play(seeds: range, two_ranks: Ranks) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            seen.update(two_ranks(chaos_cases.play, seed)[0])
        except Exception as failure:
            raise AssertionError(
                f"replay with: pytest tests/engine/test_chaos.py -m chaos --first-seed {seed} --seeds 10"
            ) from failure
    return seen


@pytest.mark.medium
@pytest.mark.needs_torch("stage 3")
@pytest.mark.parametrize("first", [100, pytest.param(100 + _FEW, marks=pytest.mark.slow)])
def test_a_few_schedules(first: int, two_ranks: Ranks) -> None:
    seen = play(range(first, first + _FEW), two_ranks)
    # They do what they are there for.
    for what in ("kept", "redone", "discarded", "mixed", "announced", "declared", "evaluated", "bf16", "8bit"):
        assert seen[what] > 0, what
    assert any("raised" in what and "stage 3" in what for what in seen), seen
    assert seen["stepped"] == 5 * _FEW


@pytest.mark.full
@pytest.mark.chaos
@pytest.mark.parametrize("part", range(2))
def test_chosen_schedules(part: int, request: pytest.FixtureRequest, two_ranks: Ranks) -> None:
    """A tenth of ``--seeds``, in two parts: each takes a hundred times as long as one of one process."""
    first, count = request.config.getoption("--first-seed"), max(2, request.config.getoption("--seeds") // 10)
    half = (count + 1) // 2
    mine = range(first, first + half) if part == 0 else range(first + half, first + count)
    assert play(mine, two_ranks)["stepped"] == 5 * len(mine)

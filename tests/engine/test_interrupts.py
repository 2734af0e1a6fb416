"""Ctrl-C around the commit of a step on two ranks: the step is applied on all or on none, or all get an error."""

from __future__ import annotations

import pytest
from ranks import Ranks

from engine import interrupt_cases

STAGES = pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow), 3])
INTERRUPTED = pytest.mark.parametrize("interrupted", [[0], [0, 1]], ids=str)


@pytest.mark.medium
@STAGES
@INTERRUPTED
def test_ctrl_c_after_the_ranks_agreed_is_taken_when_the_step_is_whole(
    stage: int, interrupted: list[int], two_ranks: Ranks
) -> None:
    """Counted, too: the ranks' schedules stay together."""
    for at in ("measure", "preparation", "meeting", "tiles", "stepped tiles", "publishing", "published"):
        if (at, stage) == ("publishing", 0):
            continue  # each rank has stepped everything
        clip = 1e9 if at == "measure" else None
        for rank, said in enumerate(two_ranks(interrupt_cases.interrupted_step, stage, at, interrupted, clip, True)):
            assert said == [2, 2, "KeyboardInterrupt" if rank in interrupted else ""], (at, said)


@pytest.mark.medium
@STAGES
@INTERRUPTED
def test_ctrl_c_in_a_step_of_the_optimizer(stage: int, interrupted: list[int], two_ranks: Ranks) -> None:
    for at in ("meeting", "stepped tiles", "published"):
        for rank, said in enumerate(two_ranks(interrupt_cases.interrupted_step, stage, at, interrupted, None, False)):
            assert said == [2, 1, "KeyboardInterrupt" if rank in interrupted else ""], (at, said)


@pytest.mark.quick(0)
@STAGES
@INTERRUPTED
@pytest.mark.parametrize("at", ["agreement", "preparation"])
def test_ctrl_c_before_the_commit_discards_the_window_on_all_ranks(
    stage: int, interrupted: list[int], at: str, two_ranks: Ranks
) -> None:
    said = two_ranks(interrupt_cases.interrupted_step, stage, at, interrupted, None, at == "agreement")
    assert [each[0] for each in said] == [1, 1]
    for rank in (0, 1):
        assert said[rank][2].startswith("KeyboardInterrupt" if rank in interrupted else "GradientError: rank 0"), said


@pytest.mark.medium
@STAGES
@INTERRUPTED
def test_an_interrupt_that_a_step_raises_half_way_breaks_all_ranks_until_a_state_is_loaded(
    stage: int, interrupted: list[int], two_ranks: Ranks
) -> None:
    for rank, said in enumerate(two_ranks(interrupt_cases.hook_interrupted, stage, interrupted)):
        assert said[0].startswith("KeyboardInterrupt" if rank in interrupted else "BrokenStateError: rank 0"), said
        assert said[1].startswith("BrokenStateError: an earlier step failed half way on this or another rank"), said

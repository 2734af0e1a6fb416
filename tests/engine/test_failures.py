"""Ranks that fail or do different things get a clear error, and go on where they can."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import RankFailure, Ranks

from engine import failure_cases

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


@pytest.mark.quick(0)
@pytest.mark.covering(1)
@STAGES
@pytest.mark.parametrize("failing", [[0], [1], [0, 1]])
def test_after_an_exception_in_backward_zero_grad_makes_the_engine_usable(
    stage: int, failing: list[int], two_ranks: Ranks
) -> None:
    said = two_ranks(failure_cases.failing_backward, stage, failing)
    for rank in (0, 1):
        if rank in failing:
            assert said[rank][0] == "RuntimeError: exploded on purpose"
            assert "backward of this window failed (RuntimeError: exploded on purpose)" in said[rank][1]
            assert "zero_grad()" in said[rank][1]


@pytest.mark.needs_torch("stage 3")
def test_a_rank_that_gave_up_its_window_says_so_whatever_is_in_its_grad(two_ranks: Ranks) -> None:
    """What it finds there is looked at, and refused at stage 3, before it tells why no rank can step."""
    first, second = two_ranks(failure_cases.failing_backward, 3, [0], True)
    assert first[0] == "RuntimeError: exploded on purpose"
    assert "backward of this window failed (RuntimeError: exploded on purpose)" in first[1]
    assert second[-1].startswith("GradientError: rank 0 failed in this window")


@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_that_is_not_due_meets_nobody_after_a_failed_backward(stage: int, two_ranks: Ranks) -> None:
    """The other rank, whose step is not due, would not come."""
    first, second = two_ranks(failure_cases.failing_backward_of_several, stage)
    assert "exploded on purpose" in second[0] and first[:3] == ["", "", ""]
    assert all("a backward of this window failed" in said for said in (second[1], second[3]))
    assert "GradientError" in first[3]


@pytest.mark.parametrize("goes_on", [True, False])
def test_one_step_for_several_backwards_is_due_after_a_failed_one(goes_on: bool, two_ranks: Ranks) -> None:
    first, second = two_ranks(failure_cases.failing_backward_before_one_step, 1, goes_on)
    assert "exploded on purpose" in second[0] and "a backward of this window failed" in second[1]
    assert ("a backward of this window failed" in second[0]) == goes_on
    assert first[0] == "" and "GradientError" in first[1]


@pytest.mark.parametrize("stage", [0, 2])
def test_no_step_is_due_before_a_declared_boundary_after_a_failed_backward(stage: int, two_ranks: Ranks) -> None:
    first, second = two_ranks(failure_cases.failing_backward_before_a_declared_boundary, stage)
    assert "exploded on purpose" in second[0] and "a backward of this window failed" in second[1]
    assert first[:2] == ["", ""] and "rank 1 failed" in first[2] + first[3] and "failed" in second[3]


@pytest.mark.covering(2)
@pytest.mark.quick(1)
@STAGES
@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("failing", [[0], [0, 1]], ids=str)
def test_ranks_that_give_up_their_window_at_once_meet_again(
    stage: int, failing: list[int], slow: bool, two_ranks: Ranks
) -> None:
    said = two_ranks(failure_cases.failing_backward_discarded_at_once, stage, failing, slow)
    for rank in failing:
        assert said[rank] == ["RuntimeError: exploded on purpose"]
    if failing == [0]:
        assert said[1][0].startswith("GradientError: rank 0 failed in this window")


@STAGES
def test_a_rank_hears_in_its_second_backward_that_the_window_was_given_up(stage: int, two_ranks: Ranks) -> None:
    """What it queued for that backward is not sent: the other rank is at its next window."""
    first, second = two_ranks(failure_cases.window_discarded_between_backwards, stage)
    assert first == ["RuntimeError: exploded on purpose"]
    assert second[0].startswith("GradientError: rank 0 failed in this window")


@pytest.mark.parametrize("stage, backward_first", [(0, False), (1, True), (2, False), (2, True)])
def test_a_rank_that_heard_of_it_hears_it_again_until_it_discards(
    stage: int, backward_first: bool, two_ranks: Ranks
) -> None:
    """Also with a gradient set by hand: the other rank is at its next window, and meets it no more in this one."""
    first, second = two_ranks(failure_cases.calls_after_hearing, stage, backward_first)
    assert first == ["RuntimeError: exploded on purpose"]
    assert len(second) == 2 + backward_first
    for said in second:
        assert said.startswith("GradientError: rank 0 failed in this window"), second


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_compiled_parts_of_a_model(stage: int, two_ranks: Ranks) -> None:
    two_ranks(failure_cases.compiled_blocks, stage)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("one_steps", [False, True])
def test_ranks_that_read_different_states(stage: int, one_steps: bool, two_ranks: Ranks) -> None:
    """Where each has a part of the state: they meet before anything of either size is sent."""
    for said in two_ranks(failure_cases.different_states, stage, one_steps):
        assert said.startswith("RankError"), said


@STAGES
@pytest.mark.parametrize("compiling", [[0], pytest.param([0, 1], marks=pytest.mark.slow)], ids=str)
def test_compiled_autograd_is_refused_by_name(stage: int, compiling: list[int], two_ranks: Ranks) -> None:
    """In a forward that a backward would follow, and in engine.backward(), of which the other rank hears."""
    for rank, said in enumerate(two_ranks(failure_cases.compiled_autograd, stage, compiling)):
        if rank in compiling:
            assert len(said) == 3
            for each in said:
                assert each.startswith("GradientError") and "compiled_autograd = False" in each
        else:
            assert said[-1].startswith("GradientError: rank 0 failed in this window"), said


@STAGES
def test_a_rank_that_runs_one_backward_less_is_named_within_seconds(stage: int, two_ranks: Ranks) -> None:
    for said, seconds in two_ranks(failure_cases.one_backward_less, stage, debug=True):
        assert said.startswith("RankError: ")
        assert "rank 0" in said
        assert "rank 1" in said
        assert "backward" in said
        assert seconds < 10


def test_other_parameters_are_found_in_debug_mode(two_ranks: Ranks) -> None:
    assert two_ranks(failure_cases.other_parameters, debug=False) == ["", ""]
    for said in two_ranks(failure_cases.other_parameters, debug=True):
        assert "second.bias" in said
        assert "rank 1" in said


def test_what_one_rank_refuses_no_rank_steps(two_ranks: Ranks) -> None:
    said = two_ranks(failure_cases.bad_group_on_one_rank)
    assert said[0].startswith("GradientError: rank 1 failed in this window")
    assert "lr must be a number of at least 0" in said[1]


@pytest.mark.quick(0)
@STAGES
@pytest.mark.parametrize("ranks", [[0], [0, 1]])
def test_a_gradient_that_was_reduced_cannot_be_taken_out(stage: int, ranks: list[int], two_ranks: Ranks) -> None:
    """Before it was reduced it can, as in torch; afterwards the other ranks have it."""
    for rank, said in enumerate(two_ranks(failure_cases.gradient_taken_out, stage, ranks)):
        if stage < 2:
            assert said == ""
        elif rank in ranks:
            assert said.startswith(
                "GradientError: a gradient was taken out of .grad (set to None or replaced, as model.zero_grad() does)"
            )
            assert "zero_grad()" in said
        else:
            assert said.startswith("GradientError: rank 0 failed in this window")


@STAGES
def test_a_step_that_fails_half_way_on_one_rank_breaks_all(stage: int, two_ranks: Ranks) -> None:
    said = two_ranks(failure_cases.commit_that_fails_on_one_rank, stage)
    assert said[0][0].startswith("BrokenStateError: rank 1 failed")
    assert said[1][0] == "MemoryError: no memory on purpose"
    for rank in (0, 1):
        assert said[rank][1].startswith("BrokenStateError: an earlier step failed half way on this or another rank")


@STAGES
def test_an_overflow_on_one_rank_skips_the_step_on_all(stage: int, two_ranks: Ranks) -> None:
    for found in two_ranks(failure_cases.overflow_on_one_rank, stage, torch.float32):
        assert found == {"applied": False, "skipped": 1, "scale": 0.5, "later": True}


@pytest.mark.medium
@pytest.mark.parametrize(
    "stage",
    [
        *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 2)),
        pytest.param(3, marks=pytest.mark.needs_torch("stage 3")),
    ],
)
def test_what_the_survivor_of_another_ranks_death_sees_is_short(stage: int, tmp_path: Path) -> None:
    """One RankError and, once, what torch said; the same each time that it goes on."""
    with pytest.raises(RankFailure, match="rank 1: ended with exit code"):
        Ranks(2)(failure_cases.peer_that_ends, stage, str(tmp_path))
    for attempt in range(3):
        text = (tmp_path / f"{attempt}.txt").read_text()
        lines = text.splitlines()
        assert lines[-1].startswith("longshore.errors.RankError: rank 0: a collective failed (")
        assert "), so rank 1 has ended or cannot be reached; look at the first error of any rank, " in lines[-1]
        assert text.count("Traceback (most recent call last)") == 1, text
        assert text.count("RuntimeError: ") == 1, text
        assert text.count("gloo/transport") == 1, text  # the whole of what torch said is in the cause alone
        # run() and drain(), and nothing of the collective thread; at stage 3 the meeting itself, on this thread.
        assert text.count('collective_thread.py"') == 2, text
        shown = [line for line in lines if line.strip(" ^~")]  # newer Pythons mark places in lines of their own
        assert len(shown) < (40 if stage < 3 else 80), text  # torch's own hooks gather parameters


@pytest.mark.medium
@pytest.mark.parametrize(
    "stage, gathering",
    [
        pytest.param(0, None, marks=pytest.mark.slow),
        pytest.param(1, None, marks=pytest.mark.slow),
        pytest.param(1, 1, marks=pytest.mark.slow),
        (2, None),
        pytest.param(2, 1, marks=pytest.mark.slow),
        (2, 5),
    ],
)
def test_a_rank_killed_while_it_publishes_is_noticed_within_seconds(
    stage: int, gathering: int | None, two_ranks: Ranks, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    with pytest.raises(RankFailure, match=r"^rank 1: ended with exit code -?\d+$"):
        two_ranks(failure_cases.killed_while_publishing, stage, gathering, str(told))
    first, seconds, state, step = told.read_text().splitlines()
    assert first.startswith("RankError: rank 0: a collective failed (")
    assert float(seconds) < 10  # the timeout of the group is 20
    for later in (state, step):
        assert later.startswith("BrokenStateError: an earlier step failed half way on this or another rank")


@pytest.mark.medium
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_every_rank_is_told_which_one_ended(stage: int, three_ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"^rank 2: ended with exit code -9$"):
        three_ranks(failure_cases.last_of_three, stage, str(tmp_path / "told"))
    for rank in range(2):
        said, seconds = (tmp_path / f"told{rank}").read_text().splitlines()
        assert said.startswith(f"RankError: rank {rank}: a collective failed ("), said
        assert said.endswith(
            "), so rank 2 has ended or cannot be reached; look at the first error of any rank, and start again from a "
            "checkpoint"
        )
        assert float(seconds) < 10


@pytest.mark.quick(0)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_engine_that_was_destroyed_leaves_no_thread_and_no_socket(stage: int, two_ranks: Ranks) -> None:
    for first, *later in two_ranks(failure_cases.left_by_engines, stage):
        assert all(entry == first for entry in later), (first, later)

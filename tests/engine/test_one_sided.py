"""What one of two ranks does alone is told on both, with an error; no collective gets another size than it expects."""

from __future__ import annotations

import pytest
from ranks import Ranks

from engine import one_sided_cases as cases

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


@pytest.mark.covering(1)
@pytest.mark.quick(0)
@STAGES
@pytest.mark.parametrize("before", ["", "norm"])
def test_the_norm_on_one_rank(stage: int, before: str, two_ranks: Ranks) -> None:
    for said in two_ranks(cases.called_on_one_rank, stage, "norm", before):
        assert said.startswith("RankError: the ranks do different things: rank 0 is "), said


@pytest.mark.quick(0)
@pytest.mark.covering(1)
@STAGES
@pytest.mark.parametrize("before", ["", "norm"])
def test_a_window_discarded_on_one_rank(stage: int, before: str, two_ranks: Ranks) -> None:
    """Kept gradients can be discarded on one rank; reduced ones are on the others, too."""
    for said in two_ranks(cases.called_on_one_rank, stage, "zero_grad", before):
        reduced = stage > 1 or before == "norm"
        assert said.startswith("RankError: some ranks discarded gradients that had been reduced") == reduced, said


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_step_that_one_rank_refuses(stage: int, two_ranks: Ranks) -> None:
    """It refuses before it meets the other, which hears of it when that window is discarded."""
    first, second = two_ranks(cases.called_on_one_rank, stage, "raw backward", "")
    assert first == "GradientError: rank 1 failed in this window and discarded it; call zero_grad() and go on"
    assert second.startswith("LongshoreError: gradients came from loss.backward(), which the engine does not count")


@pytest.mark.quick(0)
@pytest.mark.covering(1)
@STAGES
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("in_no_sync", [False, True])
def test_a_plain_backward_that_brings_gradients_on_one_rank(
    stage: int, trained: bool, in_no_sync: bool, two_ranks: Ranks
) -> None:
    """Whoever steps without an ``engine.backward()`` asks the others; it does not return as if nothing had been."""
    first, second = two_ranks(cases.raw_backward_on_one_rank, stage, trained, in_no_sync)
    for said in first:
        assert said.startswith("LongshoreError: rank 1 has gradients of a loss.backward(), which the engine does not")
    for said in second:
        assert said.startswith("LongshoreError: gradients came from loss.backward(), which the engine does not count")


@pytest.mark.quick(0)
@STAGES
def test_steps_without_a_backward(stage: int, two_ranks: Ranks) -> None:
    two_ranks(cases.steps_without_a_backward, stage)


@pytest.mark.covering(1)
@STAGES
@pytest.mark.parametrize("raw", [False, True])
def test_a_model_discards_what_one_rank_alone_had(stage: int, raw: bool, two_ranks: Ranks) -> None:
    """On the other rank no ``.grad`` shows it: what was reduced already cannot be discarded, and that is an error."""
    first, second = two_ranks(cases.discarded_by_the_model, stage, raw)
    if stage < 2 or raw:
        assert first == second == ""
    else:
        assert first.startswith(
            "GradientError: a gradient was taken out of .grad (set to None or replaced, as model.zero_grad() does)"
        )
        assert second.startswith("GradientError: rank 0 failed in this window")


@pytest.mark.quick(0)
@STAGES
@pytest.mark.parametrize(
    "where, failing, backwards, rounds",
    [
        ("backward", 0, 1, 1),
        ("backward", 0, 2, 1),
        ("backward", 0, 3, 1),
        ("backward", 1, 2, 1),
        ("backward", 0, 1, 2),
        ("backward", 1, 3, 2),
        ("backward", 0, 1, 3),
        ("before state", 0, 1, 1),
        ("before state", 1, 2, 2),
        ("forward", 0, 0, 1),
        ("forward", 1, 1, 2),
    ],
)
def test_a_failed_window_that_all_ranks_discard(
    stage: int, where: str, failing: int, backwards: int, rounds: int, two_ranks: Ranks
) -> None:
    """The rank on which nothing failed is told of it later, when it has discarded the window itself."""
    if stage == 3:
        backwards = min(backwards, failing + 1)  # it is told in the forward after that, where it waits for the other
    first, second = two_ranks(cases.discarded_together, stage, failing, backwards, rounds, where)
    assert first == ["RuntimeError"] * rounds
    assert second == ["RuntimeError"] * (rounds > 1)


@STAGES
def test_a_window_that_fails_after_one_that_all_ranks_discarded(stage: int, two_ranks: Ranks) -> None:
    first, second = two_ranks(cases.fails_after_a_discarded_window, stage)
    assert first.startswith("RuntimeError")
    assert second == "GradientError: rank 0 failed in this window and discarded it; call zero_grad() and go on"


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    "stage, in_forward, replicas",
    [(0, False, False), (1, False, False), (2, False, False), (3, False, False), (3, True, False), (3, True, True)],
)
def test_ranks_that_fail_in_turn(stage: int, in_forward: bool, replicas: bool, two_ranks: Ranks) -> None:
    """The second does not know yet that the first gave up a window, which both have discarded."""
    first, second = two_ranks(cases.fail_in_turn, stage, in_forward, replicas)
    assert first == "GradientError: rank 1 failed in this window and discarded it; call zero_grad() and go on"
    assert second == "RuntimeError: exploded on purpose"


@pytest.mark.needs_torch("stage 3")
def test_replicas_that_discard_a_failed_window(two_ranks: Ranks) -> None:
    two_ranks(cases.replicas_discard_together)


@pytest.mark.medium
@STAGES
def test_optimizer_state_is_read_in_a_later_window(stage: int, two_ranks: Ranks) -> None:
    first, second = two_ranks(cases.reads_state_after_two_failures, stage)
    assert first.startswith("RuntimeError")
    assert second == "GradientError: rank 0 failed in this window and discarded it; call zero_grad() and go on"


@STAGES
def test_a_forward_that_fails_on_one_rank(stage: int, two_ranks: Ranks) -> None:
    """Its loop skips the batch: the others' part of it is not stepped with the next one of this rank."""
    first, second = two_ranks(cases.skipped_on_one_rank, stage, "")
    assert first == ["GradientError: rank 1 failed in this window and discarded it; call zero_grad() and go on"]
    assert second == ["RuntimeError: exploded on purpose"]


@pytest.mark.medium
@pytest.mark.parametrize("instead", ["retries", "evaluates"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_forward_that_fails_where_no_batch_is_skipped(stage: int, instead: str, two_ranks: Ranks) -> None:
    """Where nothing is gathered in it, nothing was lost."""
    first, second = two_ranks(cases.skipped_on_one_rank, stage, instead)
    assert (first, second) == ([], ["RuntimeError: exploded on purpose"])


@pytest.mark.quick(0)
@STAGES
@pytest.mark.parametrize(
    "refused, first_says, second_says",
    [
        (False, "RankError: the ranks are about to step differently", "RankError: the ranks are about to step"),
        (True, "RuntimeError: exploded on purpose", "GradientError: rank 0 refused the step"),
    ],
)
def test_a_refused_step_that_one_rank_tries_again(
    stage: int, refused: bool, first_says: str, second_says: str, two_ranks: Ranks
) -> None:
    """Its window, which the other has discarded, is not stepped with the batch of the other's next one."""
    first, second = two_ranks(cases.stepped_again_on_one_rank, stage, refused)
    assert first[0].startswith(first_says) and second[0].startswith(second_says), (first, second)
    assert second[1] == "GradientError: rank 0 failed in this window and discarded it; call zero_grad() and go on"


@pytest.mark.quick(0)
@STAGES
@pytest.mark.parametrize("backwards", [1, 2])
def test_a_backward_that_fails_is_told_in_the_step_of_the_others(stage: int, backwards: int, two_ranks: Ranks) -> None:
    first, second = two_ranks(cases.flagged_after_the_step, stage, backwards)
    assert all(each.startswith("RuntimeError") for each in first)
    assert all(each.startswith("GradientError: rank 0 failed in this window") for each in second)

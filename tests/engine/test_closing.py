"""Stages 0 and 1 reduce once a window: during the backward that is known to be the last."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks

from engine import closing_cases
from engine.scenarios import Backward, Window

STAGES = pytest.mark.parametrize("stage", [0, 1])
BUCKETS = 6
"""Of the model, at 600 elements a bucket."""
ONE = Window()
TWO = Window((Backward(), Backward()))
THREE = Window((Backward(),) * 3, step_each=True)
IN_BACKWARD, IN_STEP, TWICE = (BUCKETS, 0), (0, BUCKETS), (BUCKETS, BUCKETS)


def both(*plan: Window) -> list[tuple[Window, ...]]:
    """Both ranks make the same calls."""
    return [plan, plan]


@STAGES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_backward(stage: int, dtype: torch.dtype, two_ranks: Ranks) -> None:
    assert two_ranks(closing_cases.trained, both(ONE, ONE), stage, dtype) == [[IN_BACKWARD] * 2] * 2


@pytest.mark.quick(0)
@STAGES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_travel_with_the_last_backward(stage: int, dtype: torch.dtype, two_ranks: Ranks) -> None:
    """Heads of earlier backwards too, which the last one does not use."""
    alternating = Window(tuple(Backward(((head,),)) for head in "abc"), step_each=True)
    keys = {"gradient_accumulation_steps": 3}
    for found in two_ranks(closing_cases.trained, both(THREE, alternating), stage, dtype, **keys):
        assert found == [IN_BACKWARD] * 2


@STAGES
def test_a_backward_that_nobody_announced(stage: int, two_ranks: Ranks) -> None:
    """What was reduced is dropped, and all of it is reduced again; from then on the second backward is the last."""
    for found in two_ranks(closing_cases.trained, both(TWO, TWO, TWO, ONE, ONE), stage):
        assert found == [TWICE, IN_BACKWARD, IN_BACKWARD, IN_STEP, IN_BACKWARD]


@STAGES
def test_a_raw_backward_afterwards(stage: int, two_ranks: Ranks) -> None:
    """It uses a head that was idle when the buckets left."""
    window = Window((Backward((("a",),)), Backward((("b",),), raw=True)))
    for found in two_ranks(closing_cases.trained, both(window, ONE), stage):
        assert found[0][0] == BUCKETS and 0 < found[0][1] <= BUCKETS


@STAGES
def test_backwards_that_stay_are_not_the_last(stage: int, two_ranks: Ranks) -> None:
    window = Window((Backward(unsynchronized=True), Backward()))
    assert two_ranks(closing_cases.trained, both(window, window), stage) == [[IN_BACKWARD] * 2] * 2
    window = Window((Backward(), Backward(unsynchronized=True)))
    assert two_ranks(closing_cases.trained, both(window), stage) == [[TWICE]] * 2


@STAGES
def test_a_rank_that_is_in_step_already(stage: int, two_ranks: Ranks) -> None:
    """One rank's backward is the engine's, the other's is raw, in turns: nobody waits, and nothing is lost."""
    raw = Window((Backward(raw=True),))
    for found in two_ranks(closing_cases.trained, [(ONE, raw, ONE), (raw, ONE, ONE)], stage):
        assert found == [IN_STEP, IN_STEP, IN_BACKWARD]


@STAGES
def test_a_rank_without_a_backward(stage: int, two_ranks: Ranks) -> None:
    first, second = two_ranks(closing_cases.one_rank_has_no_backward, stage)
    assert first == second and all(change > 0 for change in first)


@STAGES
def test_without_overlap(stage: int, two_ranks: Ranks) -> None:
    zero = {"stage": stage, "reduce_bucket_size": 600, "overlap_comm": False}
    assert two_ranks(closing_cases.trained, both(ONE, ONE), stage, zero_optimization=zero) == [[IN_STEP] * 2] * 2


@pytest.mark.quick(0)
@STAGES
@pytest.mark.parametrize("by", [(0, 1), (0,), (1,)], ids=str)
def test_a_gradient_that_is_taken_out(stage: int, by: tuple[int, ...], two_ranks: Ranks) -> None:
    """After it was reduced, and before the step; by one rank alone too, where the other knows of nothing."""
    arguments: tuple[Any, ...] = (both(ONE, ONE), stage, torch.float32, "second.bias", by)
    for found in two_ranks(closing_cases.trained, *arguments):
        assert [early for early, _ in found] == [BUCKETS] * 2 and all(late > 0 for _, late in found)


@pytest.mark.quick(0)
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("bucket_numel", [600, 100_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_twice_in_one_backward(stage: int, bucket_numel: int, dtype: torch.dtype, two_ranks: Ranks) -> None:
    """Before its bucket left, where it is large, or after it: sums travel as sums."""
    found = two_ranks(closing_cases.repeated_layer, stage, bucket_numel, dtype)
    assert found == [dtype == torch.bfloat16] * 2


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("unsynchronized", [False, True])
def test_a_gradient_that_is_taken_out_after_it_was_reduced(stage: int, unsynchronized: bool, two_ranks: Ranks) -> None:
    """By a reading, or with a backward after no_sync(): the other ranks have it, so it cannot be forgotten."""
    mine, other = two_ranks(closing_cases.taken_out_after_a_reading, stage, unsynchronized)
    if unsynchronized and stage < 2:
        assert mine == other == ""  # nothing had to be reduced before step()
    else:
        assert mine.startswith("a gradient was taken out of .grad") and other.startswith("rank 0 failed")

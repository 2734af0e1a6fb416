from __future__ import annotations

import itertools
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longshore.ranks.twin_groups import timeout_of
from ranks import RankFailure, Ranks, collective_thread_cases


@pytest.mark.quick(0)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("used", [[[0, 1, 2], [0, 1, 2]], [[0, 1], [1, 2]], [[], [1]], [[], []]])
@pytest.mark.parametrize("replicated", [False, True])
def test_a_bucket_is_added_in_float32_over_those_who_have_something(
    dtype: torch.dtype, used: list[list[int]], replicated: bool, two_ranks: Ranks
) -> None:
    two_ranks(collective_thread_cases.reduction, dtype, used, 1.0, replicated)


WHERE = pytest.mark.parametrize("where", ["shared", "sockets"])


@pytest.mark.quick(0)
@WHERE
@pytest.mark.parametrize("slice_numel", [1, 14, 32])
@pytest.mark.parametrize("used", [[[0, 1, 2], [0, 1, 2]], [[0], [1, 2]]])
def test_slices_change_nothing(where: str, slice_numel: int, used: list[list[int]], two_ranks: Ranks) -> None:
    two_ranks(collective_thread_cases.reduction, torch.bfloat16, used, 1.0, False, slice_numel, where)


def test_predivision(two_ranks: Ranks) -> None:
    two_ranks(collective_thread_cases.reduction, torch.float32, [[0, 1, 2], [0, 1, 2]], 2.0, False)


@pytest.mark.medium
def test_four_ranks_reduce(four_ranks: Ranks) -> None:
    four_ranks(collective_thread_cases.reduction, torch.float32, [[0], [1, 2], [], [0, 1, 2]], 1.0, False)


def test_ranks_are_added_in_order(four_ranks: Ranks) -> None:
    """The sum of two floats is the same either way, that of four is not."""
    four_ranks(collective_thread_cases.reduction, torch.float32, [[0, 1, 2]] * 4, 1.0, False)


def test_ranks_that_do_the_same_meet(two_ranks: Ranks) -> None:
    assert two_ranks(collective_thread_cases.meeting, [1, 1], [4, 4], [2, 2]) == ["", ""]


@pytest.mark.parametrize(
    "difference",
    [([1, 2], [1, 1], [0, 0]), ([1, 1], [1, 2], [0, 0]), ([1, 1], [1, 1], [0, 1])],
)
def test_ranks_that_differ_are_named(difference: tuple, two_ranks: Ranks) -> None:
    for said in two_ranks(collective_thread_cases.meeting, *difference):
        assert said.startswith("RankError: the ranks do different things: rank 0 is in backward 1 of its window")
        assert ("(window 0), rank 1 is in backward 1 of its window (window 1);" in said) == (difference[2] == [0, 1])


def test_a_rank_in_its_last_backward_meets_those_that_are_there(two_ranks: Ranks) -> None:
    assert two_ranks(collective_thread_cases.closing) == [[False, True, True, True], [True, True, True]]


def test_a_rank_that_gave_up_is_met_again(two_ranks: Ranks) -> None:
    first, second = two_ranks(collective_thread_cases.met_again)
    differ = "RankError: the ranks do different things: rank 0 is in step(), rank 1 is reading optimizer state"
    assert first == [differ]
    assert second == [
        "GradientError: rank 0 failed in this window and discarded it; call zero_grad() and go on",
        differ,
    ]


def test_agreement(two_ranks: Ranks) -> None:
    # Of the orders, rank 0's holds; of the rest, what any rank says.
    expected = ([True, True], [1], [3, 2], [1, 0], [True, False, True])
    assert two_ranks(collective_thread_cases.agreeing) == [expected, expected]


def test_more_rounds_than_a_mask_has_bits(two_ranks: Ranks) -> None:
    assert two_ranks(collective_thread_cases.many_deferred) == [[False] * 62 + [True] * 8] * 2


@pytest.mark.quick(0)
@WHERE
@pytest.mark.parametrize(
    "chunk_numel, numels", list(itertools.product([1, 7, 40, 10_000], [[3, 50, 17], [1, 1], [200, 5]]))
)
def test_parameters_are_gathered_in_chunks(where: str, chunk_numel: int, numels: list[int], two_ranks: Ranks) -> None:
    two_ranks(collective_thread_cases.gathering, chunk_numel, numels, where)


def test_a_rank_that_dies_is_noticed_within_seconds(two_ranks: Ranks) -> None:
    two_ranks(collective_thread_cases.many_deferred)  # they are there
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"^rank 1: ended with exit code 1$"):
        two_ranks(collective_thread_cases.rank_that_ends, 1)
    assert time.monotonic() - start < 10


def test_a_thread_waits_as_long_as_the_group_of_the_user(two_ranks: Ranks) -> None:
    assert two_ranks(collective_thread_cases.twins, 123.0) == [(123.0, 123.0)] * 2


def test_a_group_is_there_when_all_ranks_have_it(two_ranks: Ranks) -> None:
    """A rank that destroyed it earlier would end a connection that gloo is still making on another."""
    assert min(two_ranks(collective_thread_cases.twins_in_turn, 0.5)) >= 0.5


class _NoBackend:
    def _get_backend(self, device: torch.device) -> Any:
        raise RuntimeError(f"no backend for {device}")


@pytest.mark.parametrize(
    "group",
    [
        SimpleNamespace(),
        _NoBackend(),
        SimpleNamespace(_get_backend=lambda device: SimpleNamespace()),
        SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=SimpleNamespace())),
        SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=SimpleNamespace(_timeout=None))),
    ],
)
def test_where_torch_does_not_say_how_long_it_is_torchs_default(group: Any) -> None:
    assert timeout_of(group, torch.device("cpu")) is None


def test_a_rank_that_waits_says_once_for_what(two_ranks: Ranks) -> None:
    (said,), other = two_ranks(collective_thread_cases.waiting, True)
    assert re.fullmatch(
        r"rank 0 is in step\(\) \(window 5\) and has waited \d+ s for rank 1, which is not there; "
        r"all ranks last met in backward 2 of its window \(window 5\)",
        said,
    )
    assert other == []


def test_nothing_is_said_where_nobody_waits_long(two_ranks: Ranks) -> None:
    assert two_ranks(collective_thread_cases.waiting, False) == [[], []]

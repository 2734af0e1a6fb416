"""Gathering of parameters: through shared memory where ranks see the same, and through sockets."""

from __future__ import annotations

import re

import pytest

from ranks import Ranks, gathering_cases


@pytest.mark.quick(0)
@pytest.mark.needs_torch("stage 3")
@pytest.mark.covering(1)
@pytest.mark.parametrize("keep", [0, 1, 3])
@pytest.mark.parametrize("where", ["shared", "sockets", "until full"])
def test_every_rank_has_what_each_one_gave(where: str, keep: int, two_ranks: Ranks) -> None:
    for found in two_ranks(gathering_cases.gathered, keep, where, keep):
        if where == "sockets":
            assert found["shared"] == 0
        elif where == "shared":
            assert found["shared"] == 60
            assert found["blocks"] <= 4 * (keep + 3), "blocks are lent again"
        else:
            assert 0 < found["shared"] < 60
        assert found["names"] == 0


@pytest.mark.needs_torch("stage 3")
def test_ranks_that_know_other_segments_begin_anew(two_ranks: Ranks) -> None:
    first, second = two_ranks(gathering_cases.gathered, 0, "shared", 1, 0.3)
    assert first["shared"] == 60
    assert 20 < second["shared"] < 60, "rank 1 stands apart for one"


@pytest.mark.covering(1)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("where", ["shared", "sockets", "until full"])
def test_what_a_thread_sends_arrives(where: str, seed: int, two_ranks: Ranks) -> None:
    for shared in two_ranks(gathering_cases.exchanged, seed, where):
        assert shared == {"shared": 60, "sockets": 0}.get(where, shared)
        assert where != "until full" or 0 < shared < 60


def test_four_ranks_exchange(four_ranks: Ranks) -> None:
    assert four_ranks(gathering_cases.exchanged, 5, "shared") == [60] * 4


@pytest.mark.needs_torch("stage 3")
def test_four_ranks(four_ranks: Ranks) -> None:
    for found in four_ranks(gathering_cases.gathered, 5, "shared", 1):
        assert found["shared"] == 60


@pytest.mark.needs_torch("stage 3")
def test_a_rank_that_begins_anew_is_not_taken_for_one_that_goes_on(two_ranks: Ranks) -> None:
    first, second = two_ranks(gathering_cases.interrupted)
    assert first == []
    assert second == ["rank 0 failed in this window and discarded it; call zero_grad() and go on"]


@pytest.mark.medium
@pytest.mark.needs_torch("stage 3")
def test_a_rank_that_waits_says_for_what(two_ranks: Ranks) -> None:
    (said,), other = two_ranks(gathering_cases.waiting)
    assert re.fullmatch(
        r"rank 0 is gathering parameters of b \(window 0\) and has waited \d+ s for rank 1, which is not there; "
        r"all ranks last met gathering parameters of a \(window 0\)",
        said,
    )
    assert other == []

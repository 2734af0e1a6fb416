"""The table that must hold: every way of training gives the weights of the plain torch loop, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from pairwise import pairwise
from ranks import Ranks

from engine import cases
from engine.scenarios import SCENARIOS

COLUMNS = {
    "scenario": list(SCENARIOS),
    "world_size": [1, 2],
    "stage": [0, 1, 2, 3],
    "place": ["none", "cpu", "simulated", "split"],
    "bucket": list(cases.BUCKETS),
    "dtype": list(cases.DTYPES),
    "ahead": list(cases.AHEAD),
}
FEW = pairwise(COLUMNS)


ALL = [
    row
    for row in itertools.product(*COLUMNS.values())
    if row not in FEW
    and (row[1] > 1 or row[4] == "small")  # one rank has no buckets
    and (row[6] == "off" or row[4] == "small")  # buckets do not matter to what is stepped ahead
    # Stage 3 goes the way of stage 2 once a gradient is there, and on one rank nothing is sharded.
    and (row[2] < 3 or (row[1] > 1 and row[4] == "small"))
]


def check(row: tuple, two_ranks: Ranks) -> None:
    name, world_size, stage, place, bucket, dtype, ahead = row
    arguments = (name, stage, place, bucket, dtype, ahead, world_size)
    results = two_ranks(cases.run, *arguments) if world_size == 2 else [cases.run(*arguments)]
    for result in results:
        assert result["tiles"] > 1
        assert result["steps"] == SCENARIOS[name].steps
        steady = ahead != "off" and SCENARIOS[name].steady
        if steady and ahead in ("on", "mixed") and name not in ("always clipped", "sometimes clipped"):
            assert result["kept"] > 0
        if (steady and ahead in ("wrong", "mixed")) or (ahead != "off" and name == "always clipped"):
            assert result["redone"] > 0
        if name == "always clipped":
            assert result["clipped"] == result["steps"]
        if name == "sometimes clipped":
            assert 0 < result["clipped"] < result["steps"]
        if name == "never clipped":
            assert result["clipped"] == 0


@pytest.mark.parametrize("row", FEW, ids=lambda row: "-".join(map(str, row)))
def test_every_pair(row: tuple, two_ranks: Ranks) -> None:
    check(row, two_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("row", ALL, ids=lambda row: "-".join(map(str, row)))
def test_every_cell(row: tuple, two_ranks: Ranks) -> None:
    check(row, two_ranks)


def test_the_pairs_are_all_there() -> None:
    for a, b in itertools.combinations(range(len(COLUMNS)), 2):
        first, second = list(COLUMNS.values())[a], list(COLUMNS.values())[b]
        assert {(row[a], row[b]) for row in FEW} == set(itertools.product(first, second))


@pytest.mark.parametrize("stage", [0, 1, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (2, 3))])
def test_four_ranks_within_a_bound(stage: int, four_ranks: Ranks) -> None:
    """Four numbers may be added in another order than the plain loop's: a few units in the last place."""
    for difference in four_ranks(cases.distance, "accumulation of 4", stage, 4):
        assert difference <= 4 * torch.finfo(torch.float32).eps

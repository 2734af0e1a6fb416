"""With a loss scale, one gradient that is not finite anywhere skips the step everywhere, and changes nothing."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from covering import covering
from ranks import Ranks
from torch_needs import skip_stage_3

from engine.overflow_cases import PARAMETERS, SCALINGS, VALUES, Overflow, Setup, skips

WHO = [(1, 0), (2, 0), (2, 1)]
"""Number of ranks, and which of them overflows."""
WHEN = [(accumulation, micro) for accumulation in (1, 2, 3) for micro in range(accumulation)]
COLUMNS: dict[str, list[Any]] = {
    "stage": [0, 1, 2, 3],
    "place": ["none", "cpu", "simulated"],
    "who": WHO,
    "scaling": list(SCALINGS),
    "clip": [None, 0.5],
    "parameter": PARAMETERS[::4],
    "when": WHEN,
    "value": VALUES,
    "last": [False, True],
    "begin with good": [False, True],
}
_AT_A_TIME = 8


def few() -> list[tuple[Any, ...]]:
    """Rows in which every two values of different columns meet, out of some: all are 60,000."""
    rows = random.Random(0).sample(list(itertools.product(*COLUMNS.values())), 2000)
    return [rows[number] for number in covering([dict(zip(COLUMNS, row, strict=True)) for row in rows], 2)]


FEW = few()
SETUPS = itertools.product([0, 1, 2, 3], ["none", "cpu"], WHO, SCALINGS)


def check(setup: Setup, overflows: list[Overflow], begin_with_good: bool, two_ranks: Ranks) -> None:
    if setup.world_size == 2:
        two_ranks(skips, setup, overflows, begin_with_good)
    else:
        skips(setup, overflows, begin_with_good)


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    "row",
    [*FEW[:10], *(pytest.param(row, marks=pytest.mark.slow) for row in FEW[10:])],
    ids=lambda row: "-".join(map(str, row)),
)
def test_every_pair(row: tuple, two_ranks: Ranks) -> None:
    stage, place, who, scaling, clip, parameter, when, value, last, begin_with_good = row
    skip_stage_3(stage)
    overflow = Overflow(parameter, *when, value, last)
    check(Setup(stage, place, *who, scaling, clip), [overflow], begin_with_good, two_ranks)


def test_the_pairs_are_all_there() -> None:
    for (a, first), (b, second) in itertools.combinations(enumerate(COLUMNS.values()), 2):
        assert {(row[a], row[b]) for row in FEW} == set(itertools.product(first, second))


@pytest.mark.full
@pytest.mark.parametrize("stage, place, who, scaling", list(SETUPS))
def test_every_position(stage: int, place: str, who: tuple[int, int], scaling: str, two_ranks: Ranks) -> None:
    """Every parameter in every backward."""
    positions = itertools.product(PARAMETERS, WHEN)
    overflows = [
        Overflow(parameter, *when, VALUES[place % 3], bool(place % 2))
        for place, (parameter, when) in enumerate(positions)
    ]
    for first in range(0, len(overflows), _AT_A_TIME):  # ranks have to answer within a time
        check(Setup(stage, place, *who, scaling), overflows[first : first + _AT_A_TIME], True, two_ranks)

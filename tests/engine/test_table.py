"""The table that must hold: every way of training gives the weights of the plain torch loop, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch_needs import skip_stage_3

from engine import cases
from engine.scenarios import SCENARIOS

COLUMNS = {
    "scenario": list(SCENARIOS),
    "world_size": [1, 2],
    "stage": [0, 1, 2, 3],
    "place": ["cpu", "simulated", "split"],  # for CPU parameters "none" is the same as "cpu"
    "bucket": list(cases.BUCKETS),
    "dtype": list(cases.DTYPES),
    "ahead": list(cases.AHEAD),
}


def is_distinct(scenario: str, world_size: int, stage: int, place: str, bucket: str, dtype: str, ahead: str) -> bool:
    """Whether no cell before it is the same program."""
    if world_size == 1:  # the stage changes nothing, and there are no buckets
        return (stage, bucket) == (0, "small")
    # Buckets do not matter to what is stepped ahead. Stage 3 goes the way of stage 2 once a gradient is there.
    return bucket == "small" or (ahead == "off" and stage < 3)


needs_muon = pytest.mark.needs_torch("torch.optim.Muon")

LONG = "40 steps with tiny tiles"
"""A cell takes as long as ten others: ``make test`` has one, and ``make test-slow`` one for each stage and dtype."""


def is_quick(scenario: str, world_size: int, stage: int, place: str, bucket: str, dtype: str, ahead: str) -> bool:
    if scenario == LONG:
        return (world_size, stage, place, bucket, dtype, ahead) == (2, 3, "simulated", "small", "bf16", "mixed")
    # On two ranks, where a cell takes ten times as long, some steps ahead are right and some wrong.
    return world_size == 1 or ahead in ("off", "mixed")


def marks(row: tuple[object, ...]) -> list[pytest.MarkDecorator]:
    if is_quick(*row):  # pyright: ignore
        return []
    scenario, _, _, place, _, _, ahead = row
    return [pytest.mark.full if scenario == LONG and (place, ahead) != ("simulated", "mixed") else pytest.mark.slow]


ROWS = [pytest.param(*row, marks=marks(row)) for row in itertools.product(*COLUMNS.values()) if is_distinct(*row)]


@pytest.mark.covering(2)
@pytest.mark.quick(1)
@pytest.mark.parametrize(tuple(COLUMNS), ROWS)
def test_every_cell(
    scenario: str, world_size: int, stage: int, place: str, bucket: str, dtype: str, ahead: str, two_ranks: Ranks
) -> None:
    check((scenario, stage, place, bucket, dtype, ahead), two_ranks if world_size == 2 else None)


def check(cell: tuple[Any, ...], ranks: Ranks | None, optimizer: str = "AdamW", states: str = "fp32") -> None:
    """Run a cell on ``ranks``, or in this process, and see that it did what its scenario is about."""
    scenario, stage, *_, ahead = cell
    world_size = ranks.world_size if ranks else 1
    skip_stage_3(*[stage] * (world_size > 1))
    results = (ranks or _here)(cases.run, *cell, world_size, optimizer, states)
    for result in results:
        assert result["formats"] == {"bf16", states} if states != "fp32" else result["formats"] == {"fp32"}
        assert result["tiles"] > 1
        assert result["steps"] == SCENARIOS[scenario].steps
        steady = ahead != "off" and SCENARIOS[scenario].steady
        if steady and ahead in ("on", "mixed") and scenario not in ("always clipped", "sometimes clipped"):
            assert result["kept"] > 0
        if (steady and ahead in ("wrong", "mixed")) or (ahead != "off" and scenario == "always clipped"):
            assert result["redone"] > 0
        if scenario == "always clipped":
            assert result["clipped"] == result["steps"]
        if scenario == "sometimes clipped":
            assert 0 < result["clipped"] < result["steps"]
        if scenario == "never clipped":
            assert result["clipped"] == 0


def _here(function: Any, *arguments: Any) -> list[Any]:
    return [function(*arguments)]


WHERE = {
    f"{world_size}-{stage}-{place}": (world_size, stage, place)
    for world_size, stage, place in itertools.product(*(COLUMNS[name] for name in ("world_size", "stage", "place")))
    if world_size == 2 or stage == 0
}
MUON_COLUMNS = {
    "where": list(WHERE),
    **{name: COLUMNS[name] for name in ("scenario", "bucket")},
    **{name: COLUMNS[name][::-1] for name in ("dtype", "ahead")},  # of equally good rows the first is a quick one
}
"""``make test`` has every scenario, and every stage at every place, and ``make test-slow`` each of those with each of
these."""


def muon_row(where: str, scenario: str, bucket: str, dtype: str, ahead: str) -> tuple[Any, ...]:
    return (scenario, *WHERE[where], bucket, dtype, ahead)


MUON_ROWS = [
    pytest.param(*cell, marks=marks(muon_row(*cell)))
    for cell in itertools.product(*MUON_COLUMNS.values())
    if is_distinct(*muon_row(*cell))
]


@needs_muon
@pytest.mark.covering(1)
@pytest.mark.quick(0)
@pytest.mark.parametrize(tuple(MUON_COLUMNS), MUON_ROWS)
def test_every_cell_with_muon(where: str, scenario: str, bucket: str, dtype: str, ahead: str, two_ranks: Ranks) -> None:
    """Matrices by Muon and the rest by AdamW. Every scenario has both."""
    world_size, stage, place = WHERE[where]
    check((scenario, stage, place, bucket, dtype, ahead), two_ranks if world_size == 2 else None, "Muon")


STATES_COLUMNS = {"states": ["bf16", "8bit"], **MUON_COLUMNS}


def states_marks(states: str, *cell: str) -> list[pytest.MarkDecorator]:
    """Of the quick rows, every other scenario has 8 bits."""
    turn = STATES_COLUMNS["states"][(list(SCENARIOS).index(cell[1]) + 1) % 2]
    return marks(muon_row(*cell)) or ([pytest.mark.slow] if states != turn else [])


STATES_ROWS = [
    pytest.param(*cell, marks=states_marks(*cell))
    for cell in itertools.product(*STATES_COLUMNS.values())
    if is_distinct(*muon_row(*cell[1:]))
]


@pytest.mark.medium
@pytest.mark.covering(1)
@pytest.mark.parametrize(tuple(STATES_COLUMNS), STATES_ROWS)
def test_every_cell_with_encoded_states(
    states: str, where: str, scenario: str, bucket: str, dtype: str, ahead: str, two_ranks: Ranks
) -> None:
    """States that are not float32; with 8 bits, some have bfloat16. ``make test`` has as many rows as with Muon."""
    world_size, stage, place = WHERE[where]
    ranks = two_ranks if world_size == 2 else None
    check((scenario, stage, place, bucket, dtype, ahead), ranks, states=states)


@pytest.mark.covering(1)
@pytest.mark.parametrize("stage", COLUMNS["stage"])
@pytest.mark.parametrize("place", ["none", *COLUMNS["place"]])
def test_on_one_rank_the_stage_changes_nothing(stage: int, place: str) -> None:
    assert cases.program(stage, place) == cases.program(0, place)
    cases.run("accumulation of 4", stage, place, "small", "bf16", "on", 1)


@pytest.mark.quick(0)
@pytest.mark.parametrize("optimizer", ["AdamW", pytest.param("Muon", marks=needs_muon)])
@pytest.mark.parametrize("stage", COLUMNS["stage"])
def test_for_cpu_parameters_none_is_the_same_as_cpu(stage: int, optimizer: str, two_ranks: Ranks) -> None:
    assert two_ranks(cases.program, stage, "none", optimizer) == two_ranks(cases.program, stage, "cpu", optimizer)
    assert cases.program(stage, "none", optimizer) == cases.program(stage, "cpu", optimizer)


@pytest.mark.medium
@pytest.mark.parametrize("stage", [0, 1, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (2, 3))])
def test_four_ranks_within_a_bound(stage: int, four_ranks: Ranks) -> None:
    """Four numbers may be added in another order than the plain loop's: a few units in the last place."""
    for difference in four_ranks(cases.distance, "accumulation of 4", stage, 4):
        assert difference <= 4 * torch.finfo(torch.float32).eps


@needs_muon
@pytest.mark.slow
@pytest.mark.parametrize("stage", COLUMNS["stage"])
@pytest.mark.parametrize("scenario", ["changing accumulation with different heads", "groups that differ in everything"])
def test_four_ranks_with_muon(scenario: str, stage: int, four_ranks: Ranks) -> None:
    """Bit for bit: Newton-Schulz makes more of a last place than a bound allows."""
    check((scenario, stage, "simulated", "small", "bf16", "mixed"), four_ranks, "Muon")


@pytest.mark.slow
@pytest.mark.parametrize("stage", COLUMNS["stage"])
@pytest.mark.parametrize("states", ["bf16", "8bit"])
def test_four_ranks_with_encoded_states(states: str, stage: int, four_ranks: Ranks) -> None:
    """Bit for bit: a number that is rounded to another neighbour is further away than a bound allows."""
    cell = "changing accumulation with different heads", stage, "simulated", "small", "bf16", "mixed"
    check(cell, four_ranks, states=states)

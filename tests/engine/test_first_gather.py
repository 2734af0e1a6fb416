"""``gather()`` of parameters that ``Init`` made, before ``initialize()``."""

from __future__ import annotations

import pytest
from on_device import device_type
from ranks import Ranks

from engine import first_gather_cases as cases

pytestmark = pytest.mark.needs_torch("stage 3")


@pytest.mark.parametrize("stage", [1, 3])
def test_every_rank_reads_the_values_of_rank_0(stage: int, two_ranks: Ranks) -> None:
    two_ranks(cases.read, stage)


@pytest.mark.covering(2)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("writer", [0, 1])
@pytest.mark.parametrize("stage", [0, 3])
def test_any_rank_may_write(stage: int, writer: int, nested: bool, two_ranks: Ranks) -> None:
    two_ranks(cases.written, stage, writer, nested)


def test_a_parameter_made_like_one_of_them(two_ranks: Ranks) -> None:
    two_ranks(cases.like_others)


def test_what_is_lost_is_an_error_on_all_ranks(two_ranks: Ranks) -> None:
    first, second = two_ranks(cases.refused)
    what = "a parameter of shape [5, 6] from before initialize()"
    for said in (first, second):
        assert said[0].startswith(f"ParameterError: rank 1, inside gather(): {what} was written without modifier_rank")
        assert said[1].startswith(
            f"ParameterError: rank 1, inside gather(): {what} was made [2] torch.float32 on cpu (p."
        )
        assert "parameters from before initialize() are what rank 0 made of its own" in said[0]
        assert "rank 1 gathers parameters of shapes [[5]], and rank 0 [[5, 6]]" in said[3]
    assert first[2].startswith("RankError: rank 1 left gather() by an exception (ArithmeticError: on purpose)")
    assert second[2] == "ArithmeticError: on purpose"


@pytest.mark.gpu
def test_they_are_on_each_ranks_device(two_devices: Ranks) -> None:
    two_devices(cases.read, 3, device_type())
    two_devices(cases.read, 3, "cpu")

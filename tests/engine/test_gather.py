"""``longshore.gather`` and ``zero.GatheredParameters`` at stage 3: :mod:`engine.gather_cases` on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks

from engine import gather_cases as cases

pytestmark = pytest.mark.needs_torch("stage 3")

KINDS = pytest.mark.parametrize("kind", ["sharded", "former", "leaf"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.mark.covering(1)
@pytest.mark.quick(0)
@DTYPES
@KINDS
def test_every_handle_reads_whole_values(kind: str, dtype: torch.dtype, two_ranks: Ranks) -> None:
    two_ranks(cases.read, kind, dtype)


@pytest.mark.covering(1)
@pytest.mark.quick(0)
@DTYPES
@KINDS
def test_every_handle_writes_whole_values(kind: str, dtype: torch.dtype, two_ranks: Ranks) -> None:
    two_ranks(cases.written, kind, dtype)


@pytest.mark.covering(1)
@pytest.mark.quick(0)
@pytest.mark.parametrize("rank", [0, 1, None])
@pytest.mark.parametrize("way", cases.WRITES)
@KINDS
def test_a_write_without_a_writer_is_an_error_on_all_ranks(
    kind: str, way: str, rank: int | None, two_ranks: Ranks
) -> None:
    (first,), (second,) = two_ranks(cases.written_without_a_writer, kind, way, rank)
    assert first == second
    assert first.startswith(
        f"ParameterError: rank {rank or 0}, inside gather(): parameter blocks.1.up.weight was written without "
        "modifier_rank, so all parameters keep"
    )


@pytest.mark.covering(2)
@pytest.mark.quick(1)
@pytest.mark.parametrize("when", [cases.changed_outside, cases.changed_before_the_step], ids=lambda f: f.__name__)
@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
@pytest.mark.parametrize("what", cases.OUTSIDE)
def test_a_former_parameter_that_is_changed_is_an_error(
    what: str, ranks: tuple[int, ...], when: Any, two_ranks: Ranks
) -> None:
    said = two_ranks(when, what, ranks)
    for rank, words in enumerate(said):
        assert words.startswith(
            f"ParameterError: parameter blocks.1.up.weight was {what} through the object that it was before"
            if rank in ranks
            else "GradientError: rank 1 failed in this window"
        ), words


def test_gradients_where_a_parameter_is_held_from_before(two_ranks: Ranks) -> None:
    for said in two_ranks(cases.gradients_of_former_ones):
        assert "its gradient is on the host" in said, said


def test_groups_of_parameters_from_before(two_ranks: Ranks) -> None:
    for said in two_ranks(cases.groups_of_former_ones):
        assert "ValueError: parameter 1.0, of shape [3], is not one of the model that initialize() was given" in said


@pytest.mark.medium
@DTYPES
def test_whole_tensors_are_loaded_into_shards(dtype: torch.dtype, two_ranks: Ranks) -> None:
    for said in two_ranks(cases.loaded_as_a_whole, dtype):
        assert said.startswith("ParameterError: load_state_dict(assign=True) would put another tensor"), said


@pytest.mark.medium
@KINDS
def test_a_gradient_of_a_handle(kind: str, two_ranks: Ranks) -> None:
    for (said,) in two_ranks(cases.differentiated, kind):
        assert ("blocks.1.up.weight got a gradient where it is held from before" in said) == (kind == "former"), said


@pytest.mark.parametrize("rank", [0, 1])
def test_a_parameter_keeps_its_shape(rank: int, two_ranks: Ranks) -> None:
    said = two_ranks(cases.reshaped, rank)
    assert said[0] == said[1]
    assert f"rank {rank}, inside gather(): parameter blocks.1.up.weight is [7, 5] torch.float32 on cpu" in said[0]


def test_blocks_inside_blocks(two_ranks: Ranks) -> None:
    for said in two_ranks(cases.nested):
        assert len(said) == 1 and "blocks.1.up.weight was written without modifier_rank" in said[0]


@pytest.mark.quick(0)
@pytest.mark.parametrize("modifier_rank", [None, 1])
@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_an_exception_inside(ranks: tuple[int, ...], modifier_rank: int | None, two_ranks: Ranks) -> None:
    for rank, said in enumerate(two_ranks(cases.left_by_an_exception, ranks, modifier_rank)):
        if rank in ranks:
            assert said == "ArithmeticError: on purpose"
        else:
            assert said.startswith(f"RankError: rank {ranks[0]} left gather() by an exception (ArithmeticError: on ")


def test_training_inside(two_ranks: Ranks) -> None:
    for stepped, saved in two_ranks(cases.trained_inside):
        assert stepped.startswith("LongshoreError: this rank is in step() inside gather()"), stepped
        assert saved.startswith("LongshoreError: this rank is saving a checkpoint inside gather()"), saved


def test_gradients_are_read_inside(two_ranks: Ranks) -> None:
    two_ranks(cases.gradients_inside)


def test_a_write_where_writes_are_not_looked_for(two_ranks: Ranks) -> None:
    two_ranks(cases.written_where_writes_are_not_looked_for)


def test_a_forward_has_what_was_written(two_ranks: Ranks) -> None:
    two_ranks(cases.forward_after_a_write)


def test_weights_loaded_module_by_module(two_ranks: Ranks) -> None:
    two_ranks(cases.loaded_inside)


def test_frozen_parameters(two_ranks: Ranks) -> None:
    two_ranks(cases.frozen)


def test_tied_parameters(two_ranks: Ranks) -> None:
    two_ranks(cases.tied)


def test_masters_of_parameters_from_before(two_ranks: Ranks) -> None:
    two_ranks(cases.masters_of_former_ones)


def test_masters_are_not_set_inside(two_ranks: Ranks) -> None:
    for said in two_ranks(cases.master_set_inside):
        assert said.startswith("ParameterError: parameter blocks.1.up.weight is whole inside gather()"), said


def test_parameters_of_no_engine(two_ranks: Ranks) -> None:
    for said in two_ranks(cases.of_no_engine):
        assert all("belongs to no model that longshore.initialize() was given" in each for each in said), said

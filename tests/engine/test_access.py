from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn

import longshore
from engine import access_cases
from engine.scenarios import make_model
from longshore import utils


@pytest.mark.covering(1)
@pytest.mark.quick(0)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("staged", [False, True])
def test_two_ranks_read_and_write_whole_values(stage: int, dtype: torch.dtype, staged: bool, two_ranks: Ranks) -> None:
    two_ranks(access_cases.read_and_write, stage, dtype, 2, staged)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_two_ranks_edit_states_that_were_handed_out(stage: int, two_ranks: Ranks) -> None:
    two_ranks(access_cases.edit_state, stage)


@pytest.mark.covering(1)
@pytest.mark.quick(0)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("raw", [False, True])
def test_a_gradient_is_read_between_backwards(stage: int, raw: bool, two_ranks: Ranks) -> None:
    two_ranks(access_cases.read_between_backwards, stage, raw)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_frozen_parameters_are_read_and_written(stage: int, dtype: torch.dtype, two_ranks: Ranks) -> None:
    two_ranks(access_cases.frozen_members, stage, dtype)


@pytest.mark.quick(0)
@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1)), 2, 3])
def test_state_is_written_while_gradients_travel(stage: int, two_ranks: Ranks) -> None:
    assert min(two_ranks(access_cases.write_while_gradients_travel, stage)) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("staged", [False, True])
def test_one_rank_reads_and_writes(dtype: torch.dtype, staged: bool) -> None:
    access_cases.read_and_write(2, dtype, 1, staged)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["plain", "kept", "released"])
def test_a_gradient_is_read_without_an_engine(how: str, dtype: torch.dtype) -> None:
    access_cases.read_without_an_engine(how, dtype, sharded=False)


@pytest.mark.quick(0)
@pytest.mark.needs_torch("stage 3")
@pytest.mark.parametrize("how", ["plain", "kept", "released"])
def test_a_gradient_of_shards_is_read_without_an_engine(how: str, two_ranks: Ranks) -> None:
    two_ranks(access_cases.read_without_an_engine, how, torch.bfloat16, sharded=True)


def test_what_no_engine_steps() -> None:
    stranger = torch.nn.Parameter(torch.ones(3))
    assert utils.safe_get_full_fp32_param(stranger) is None
    assert utils.safe_get_full_grad(stranger) is None
    assert utils.safe_get_full_optimizer_state(stranger, "exp_avg") is None
    for call in (
        lambda: utils.safe_set_full_fp32_param(stranger, torch.ones(3)),
        lambda: utils.safe_set_full_grad(stranger, torch.ones(3)),
        lambda: utils.safe_set_full_optimizer_state(stranger, torch.ones(3), "exp_avg"),
    ):
        with pytest.raises(ValueError, match="no engine steps"):
            call()
    with pytest.raises(TypeError, match="expected a parameter, not str"):
        utils.safe_get_full_grad("weight")  # type: ignore[arg-type]


def test_bad_values_are_refused_by_name() -> None:
    model = make_model(torch.float32)
    engine = longshore.initialize(model=model, config=longshore.Config(optimizer={"type": "AdamW"})).engine
    weight = model.first.weight
    with pytest.raises(ValueError, match=r"parameter first.weight has shape \[33, 19\], and the value is \[3\]"):
        utils.safe_set_full_fp32_param(weight, torch.ones(3))
    with pytest.raises(ValueError, match=r"exp_avg, exp_avg_sq, and no 'momentum_buffer'"):
        utils.safe_get_full_optimizer_state(weight, "momentum_buffer")
    with pytest.raises(ValueError, match=r"first\.weight has no gradient in this window"):
        utils.safe_set_full_grad(weight, torch.ones(33, 19))
    engine.destroy()


def _calls_to_read_one(of: int) -> int:
    parameters = [nn.Parameter(torch.full((3,), float(index))) for index in range(of)]
    optimizer = longshore.AdamW(parameters, lr=1e-3, release_gradients=True)
    torch.stack([each.square().sum() for each in parameters]).sum().backward()
    calls = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        found = utils.safe_get_full_grad(parameters[-1])
    finally:
        sys.setprofile(before)
    assert found is not None and torch.equal(found, 2 * parameters[-1].detach())
    assert all(torch.equal(_read(each), 2 * each.detach()) for each in parameters)
    optimizer.close()
    return calls


def _read(parameter: nn.Parameter) -> Tensor:
    found = utils.safe_get_full_grad(parameter)
    assert found is not None
    return found


def test_a_gradient_on_the_host_is_read_without_a_look_at_the_others() -> None:
    """All gradients of a model are read in a time in proportion to their number, and not to its square."""
    assert _calls_to_read_one(of=100) == _calls_to_read_one(of=10)

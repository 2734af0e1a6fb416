"""Muon on one rank and several, at every stage: the weights of the plain loop, bit for bit."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from ranks import Ranks

from engine import muon_cases as cases
from longshore.layout.tiles import DimRange, MatrixLayout, Spec
from longshore.optim.rules.muon import MuonRule, matrix_layout
from longshore.store.exchange import batched, owners_of
from longshore.store.ownership import SharedOwnership
from longshore.tiles import Matrix

pytestmark = pytest.mark.needs_torch("torch.optim.Muon")

STEPS = 4


@pytest.mark.quick(0)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_ranks(stage: int, dtype: torch.dtype, two_ranks: Ranks) -> None:
    assert two_ranks(cases.run, stage, dtype) == [[[]] * STEPS] * 2


@pytest.mark.medium
@pytest.mark.parametrize("stage", [1, 3])
def test_clipping_on_two_ranks(stage: int, two_ranks: Ranks) -> None:
    assert two_ranks(cases.run, stage, torch.float32, 0.5) == [[[]] * STEPS] * 2


@pytest.mark.covering(2)
@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stepped_ahead(stage: int, clipping: float, dtype: torch.dtype, two_ranks: Ranks) -> None:
    """While backward runs, matrices up to what is to be transformed; and again where clipping comes."""
    for differing, counts in two_ranks(cases.ahead, stage, dtype, clipping):
        assert differing == [[]] * STEPS
        begun, kept, redone = counts[1]  # the first window tells what to expect
        assert begun > 0 and (kept, redone) == ((0, begun) if clipping else (begun, 0))


@pytest.mark.quick(0)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_on_the_device(stage: int, two_ranks: Ranks) -> None:
    assert two_ranks(cases.run, stage, torch.bfloat16, offload={"device": "none"}) == [[[]] * STEPS] * 2


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_four_ranks(stage: int, four_ranks: Ranks) -> None:
    assert four_ranks(cases.run, stage, torch.float32, 0.5) == [[[]] * STEPS] * 4


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_of_one_rank_goes_on_with_four(stage: int, four_ranks: Ranks, tmp_path: Path) -> None:
    cases.save(0, str(tmp_path))
    assert four_ranks(cases.go_on, stage, str(tmp_path), 1) == [[[]] * 3] * 4


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank(stage: int) -> None:
    assert cases.run(stage, torch.float32) == [[]] * STEPS


@pytest.mark.medium
@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_on_which_a_transformation_fails(stage: int, two_ranks: Ranks) -> None:
    """All ranks are told at once, and no rank steps on with a state that is half old."""
    (first, after), (own, own_after) = two_ranks(cases.one_rank_fails, stage)
    assert "no memory" in own and "rank 1" in first and "BrokenStateError" in first
    assert after.startswith("BrokenStateError") and own_after.startswith("BrokenStateError")


@pytest.mark.quick(0)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_rank_whose_device_has_no_memory(stage: int, two_ranks: Ranks) -> None:
    """Nothing is stepped on any rank, and training goes on."""
    (errors, found), (own_errors, own_found) = two_ranks(cases.no_memory_on_one_rank, stage)
    assert found == own_found == [[]] * 4
    assert errors[1] == "GradientError: rank 1 refused the step (see its own error); nothing was stepped"
    assert own_errors[1] == "OutOfMemoryError: no memory"
    assert [error for step, error in enumerate(errors + own_errors) if step % 4 != 1] == [""] * 6


@pytest.mark.medium
@pytest.mark.parametrize(("stages", "saved_by"), [((1, 3), 2), ((3, 0), 2), ((2, 2), 2), ((0, 3), 1)])
def test_checkpoints_go_on_with_other_ranks_and_stages(
    stages: tuple[int, int], saved_by: int, two_ranks: Ranks, tmp_path: Path
) -> None:
    """From two ranks to two and to one, and from one to two."""
    saving, loading = stages
    if saved_by == 2:
        two_ranks(cases.save, saving, str(tmp_path))
    else:
        cases.save(saving, str(tmp_path))
    assert two_ranks(cases.go_on, loading, str(tmp_path), saved_by) == [[[]] * 3] * 2
    assert cases.go_on(loading, str(tmp_path), saved_by) == [[]] * 3


@pytest.mark.quick(0)
@pytest.mark.parametrize("stage", [0, 3])
def test_states_are_found_by_name(stage: int, two_ranks: Ranks) -> None:
    for same, error in two_ranks(cases.states, stage):
        assert same and error == "the optimizer's state has momentum_buffer, and no 'exp_avg'"


def test_matrices_count_as_offloaded() -> None:
    engine = cases.started(0, torch.float32)
    cases.train(engine, 0)
    assert engine.explain().offloaded_share == engine.explain().ratio == 1.0
    engine.destroy()


def test_tensor_parallelism_is_refused() -> None:
    ownership = mock.Mock()  # whose gradients are averaged over other ranks than all
    matrix = MatrixLayout(4, 4, (DimRange(0, 0, 4),)).whole(0)
    with pytest.raises(ValueError, match="tensor parallelism has divided them"):
        SharedOwnership._check_undivided(ownership, [Spec(0, 16, torch.float32, matrix=matrix)])


@pytest.mark.parametrize("world_size", [2, 8])
def test_every_rank_has_its_share_of_large_matrices(world_size: int) -> None:
    """Of a model of 8 billion parameters: no batch leaves most ranks waiting for one."""
    shapes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), *[(14336, 4096)] * 2, (4096, 14336)] * 32
    rule = MuonRule(0.02, 0.1, 0.95, True, (3.4445, -4.7750, 2.0315), 1e-7, 5, None)
    matrices = [Matrix(index, matrix_layout(shape, None, 0), rule) for index, shape in enumerate(shapes)]
    busiest = whole = 0
    for batch in batched(matrices, world_size):
        sums = [0] * world_size
        for matrix, owner in zip(batch, owners_of(batch, world_size), strict=True):
            sums[owner] += matrix.numel * min(matrix.layout.rows, matrix.layout.columns)
        busiest, whole = busiest + max(sums), whole + sum(sums)
    assert world_size * busiest < 1.35 * whole

"""Stage 3 on a model that its user put on tensor parallelism first, and on FSDP2 then."""

from __future__ import annotations

import pytest
import torch
from ranks import Ranks

from engine import tensor_parallel_cases as cases

pytestmark = pytest.mark.needs_torch("stage 3")


@pytest.mark.medium
@pytest.mark.parametrize(
    "dtype, clip",
    [*(pytest.param(torch.float32, clip, marks=pytest.mark.slow) for clip in (None, 0.05)), (torch.bfloat16, 0.05)],
    ids=str,
)
def test_the_weights_are_those_of_tensor_parallelism_alone(
    dtype: torch.dtype, clip: float | None, four_ranks: Ranks
) -> None:
    four_ranks(cases.trained, dtype, clip, (2, 2))


@pytest.mark.medium
@pytest.mark.parametrize(
    "shape", [(2, 1, 2), pytest.param((1, 4), marks=pytest.mark.slow)], ids=["replicas", "all ranks"]
)
def test_in_other_meshes(shape: tuple[int, ...], four_ranks: Ranks) -> None:
    four_ranks(cases.trained, torch.float32, 0.05, shape)


@pytest.mark.medium
@pytest.mark.parametrize(
    "parameter",
    [*(pytest.param(f"blocks.0.{name}.weight", marks=pytest.mark.slow) for name in ("up", "norm")), "norm.weight"],
)
def test_an_overflow_on_one_rank_is_skipped_by_all(parameter: str, four_ranks: Ranks) -> None:
    """Of what is cut, of what is a sum over ranks, and of what each has and only the first ones count."""
    four_ranks(cases.overflowing, parameter)


@pytest.mark.medium
def test_one_engine_after_another(four_ranks: Ranks) -> None:
    four_ranks(cases.engines_on_one_mesh)


@pytest.mark.medium
def test_a_parameter_used_by_some_ranks_of_tensor_parallelism_is_named(four_ranks: Ranks) -> None:
    for said in four_ranks(cases.used_in_one_part):
        assert said.startswith("GradientError: parameter extra.weight has a gradient on rank 0, 2, and none on the")


@pytest.mark.medium
@pytest.mark.parametrize(
    "failing", [[3], *(pytest.param(each, marks=pytest.mark.slow) for each in ([0], [1, 2], [0, 1, 2, 3]))], ids=str
)
def test_a_backward_that_raises_is_told_to_all_ranks(failing: list[int], four_ranks: Ranks) -> None:
    for rank, said in enumerate(four_ranks(cases.failing_backward, failing)):
        for backward, step in (said[:2], said[2:]):
            if rank in failing:
                assert backward == "RuntimeError: exploded on purpose"
                assert "zero_grad()" in step
            else:
                heard = next(each for each in (backward, step) if each)
                assert heard.startswith("GradientError: "), (rank, said)


@pytest.mark.slow
def test_reading_and_writing(four_ranks: Ranks) -> None:
    four_ranks(cases.read_and_written)


def test_batches(four_ranks: Ranks) -> None:
    first, second, third, fourth = four_ranks(cases.batches)
    assert first == second and third == fourth
    assert sorted(first + third) == list(range(12))


@pytest.mark.quick(0)
@pytest.mark.parametrize("release", [False, True], ids=["kept", "released"])
@pytest.mark.parametrize("on_fsdp", [False, True], ids=["alone", "with FSDP2"])
def test_without_the_engine(on_fsdp: bool, release: bool, four_ranks: Ranks) -> None:
    four_ranks(cases.by_the_optimizer_alone, on_fsdp, release)


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    "what, says",
    [
        ("tensor parallelism alone", "ValueError: parameter embedding.weight is a DTensor, and fully_shard was not"),
        ("columns", "ValueError: parameter blocks.0.down.weight is placed as (_StridedShard(dim=1, sf=2), Shard"),
        ("two dimensions", "ValueError: parameter weight is placed as (_StridedShard(dim=0, sf=2), Replicate(), Shard"),
        ("write", "ValueError: parameter blocks.0.up.weight is one of tensor parallelism, of which gather() gives a"),
    ],
)
def test_refused(what: str, says: str, four_ranks: Ranks) -> None:
    for said in four_ranks(cases.refused, what):
        assert said.startswith(says), said

"""Stage 3: what is true of it alone. What holds at every stage is in the other files, which run it too."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import nn

from engine import fully_sharded_cases as cases
from longshore.engine.config import ConfigError
from longshore.units import units_of

pytestmark = pytest.mark.needs_torch("stage 3")

BLOCKS = ["", "blocks.0", "blocks.1", "blocks.2"]
DTYPES = pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float32, id="fp32", marks=pytest.mark.slow), pytest.param(torch.bfloat16, id="bf16")],
)


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    "policy, units",
    [
        ("auto", BLOCKS),
        (["Block"], BLOCKS),
        (80, BLOCKS),
    ],
    ids=str,
)
def test_wrap_policy(policy: Any, units: list[str], two_ranks: Ranks) -> None:
    for found in two_ranks(cases.blocks_are_units, policy):
        assert found == units


class Named(nn.Module):
    """As models of transformers are: a class that must not be split, named by the part that has it."""

    _no_split_modules = ("Block", "NotHere")

    def __init__(self) -> None:
        super().__init__()
        self.first = cases.Block()
        self.pair = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def test_units() -> None:
    model = nn.ModuleDict({"inside": Named(), "outside": nn.Linear(2, 2)})
    names = {id(module): name for name, module in model.named_modules()}

    def units(policy: Any, of: nn.Module = model) -> list[str]:
        return [names[id(module)] for module in units_of(of, policy)]

    assert units("auto") == ["inside.first"]
    model["inside"]._no_split_modules = None
    assert units("auto") == ["inside.pair.0", "inside.pair.1"]
    model["outside"].weight = model["inside"].pair[1].weight  # tied: gathered with the model
    assert units("auto") == ["inside.pair.0"]
    model["outside"] = nn.Linear(2, 2)
    names.update((id(module), name) for name, module in model.named_modules())
    assert units(["Linear"]) == ["outside", "inside.pair.1", "inside.pair.0", "inside.first.down", "inside.first.up"]
    assert units("Sequential") == ["inside.pair"]
    assert units(20) == ["inside.pair", "inside.first.down", "inside.first.up"]
    assert units(24) == ["inside.pair", "inside.first.down", "inside.first.up"]
    assert units(25) == ["inside.first.down", "inside.first.up", "inside"]
    assert units(10**6) == []
    assert units(lambda name, module: name == "outside") == ["outside"]
    with pytest.raises(
        ValueError, match="wrap_policy names Blok, and the model has no module of that class; its classes: B"
    ):
        units(["Blok"])
    for wrong in (0, True, -3):
        with pytest.raises(ValueError, match="wrap_policy counts elements from 1 on"):
            units(wrong)
    for wrong in (2e4, [nn.Linear], None):
        with pytest.raises(ValueError, match='it takes "auto", a list of names of classes'):
            units(wrong)


@DTYPES
def test_a_parameter_used_on_one_rank(dtype: torch.dtype, two_ranks: Ranks) -> None:
    two_ranks(cases.used_on_one_rank, dtype)


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_block_that_one_rank_leaves_out_is_named(in_backward: bool, two_ranks: Ranks) -> None:
    said = [found[0] for found in two_ranks(cases.left_out_on_one_rank, in_backward)]
    assert any("gathering parameters of blocks." in each for each in said), said
    assert all(
        each.startswith(("RankError: the ranks do different things: rank 0 is", "GradientError")) for each in said
    )


def test_evaluation_between_steps(two_ranks: Ranks) -> None:
    two_ranks(cases.evaluated_between_steps)


def test_a_graph_older_than_the_weights_raises(two_ranks: Ranks) -> None:
    for said in two_ranks(cases.old_graph):
        assert "has been modified by an inplace operation" in said


@pytest.mark.parametrize("forward_first", [True, False])
def test_zero_grad_between_forward_and_backward(forward_first: bool, two_ranks: Ranks) -> None:
    two_ranks(cases.discarded_between, forward_first)


@pytest.mark.parametrize("part", ["", "head"])
def test_a_modules_zero_grad_discards_while_its_parameters_are_gathered(part: str, two_ranks: Ranks) -> None:
    two_ranks(cases.discarded_while_gathered, part)


@pytest.mark.covering(1)
@pytest.mark.quick(0)
@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_training_goes_on(where: str, ranks: list[int], two_ranks: Ranks) -> None:
    for rank, (said,) in enumerate(two_ranks(cases.failing, where, ranks)):
        if rank in ranks:
            assert said == "ArithmeticError: on purpose"
        else:
            assert said.startswith(f"GradientError: rank {ranks[0]} failed in this window and discarded it")


def check_told(said: list[list[str]], raised: list[int]) -> None:
    for rank, (each,) in enumerate(said):
        if rank in raised:
            assert each == "ArithmeticError: on purpose"
        else:
            assert each.startswith(f"GradientError: rank {raised[0]} failed in this window and discarded it")


@pytest.mark.covering(1)
@pytest.mark.quick(0)
@pytest.mark.parametrize("ranks", [[0], [0, 1]], ids=str)
@pytest.mark.parametrize(
    "path, where, raw",
    [
        # Nothing is gathered behind it: the others learn of it in backward, and not in a round that it is not in.
        ("", "forward", False),
        ("", "forward", True),
        # In the middle: the others wait to gather, and this rank for their part of the round.
        ("blocks.2", "backward", False),
        ("blocks.0", "backward", False),
    ],
)
def test_an_exception_anywhere(path: str, where: str, raw: bool, ranks: list[int], two_ranks: Ranks) -> None:
    check_told(two_ranks(cases.failing_in, path, where, ranks, raw), ranks)


@pytest.mark.parametrize(("path", "where"), [("blocks.2", "backward"), ("blocks.1", "forward")])
def test_an_exception_is_told_at_once(path: str, where: str, two_ranks: Ranks) -> None:
    """And not only when the rank that raised discards its window: a script may take a while to do so, or never does."""
    until = f"told {secrets.token_hex(8)}"
    check_told(two_ranks(cases.failing_in, path, where, [0], False, until), [0])


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_an_accumulation_window(where: str, two_ranks: Ranks) -> None:
    check_told(two_ranks(cases.failing_once_more, where), [0])


@pytest.mark.covering(1)
@pytest.mark.quick(0)
@DTYPES
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool, backwards: int, dtype: torch.dtype, two_ranks: Ranks) -> None:
    two_ranks(cases.recomputed, reentrant, dtype, backwards)


@pytest.mark.quick(0)
@pytest.mark.parametrize("ahead", [1, 2])
def test_prefetch(ahead: int, two_ranks: Ranks) -> None:
    two_ranks(cases.prefetched, ahead)


@pytest.mark.parametrize("stage", [1, 3])
def test_gather(stage: int, two_ranks: Ranks) -> None:
    two_ranks(cases.gathered, stage)


@pytest.mark.quick(0)
@pytest.mark.parametrize("discard", [False, True])
def test_two_losses_of_one_forward(discard: bool, two_ranks: Ranks) -> None:
    two_ranks(cases.two_losses_of_one_forward, discard)


@DTYPES
@pytest.mark.slow
def test_four_ranks_have_the_bits_of_stage_2(dtype: torch.dtype, four_ranks: Ranks) -> None:
    four_ranks(cases.equal_to_stage_2, dtype)


@pytest.mark.medium
@DTYPES
def test_replicas_of_shards(dtype: torch.dtype, four_ranks: Ranks) -> None:
    four_ranks(cases.replicas_of_shards, dtype)


@pytest.mark.medium
def test_memory(two_ranks: Ranks) -> None:
    """Beside its shards a rank has at most two blocks, their parameters and their gradients, and what of its shards of
    gradients may be on its way to the host: here half a block."""
    found = two_ranks(cases.memory)
    assert sum(each["shards"] for each in found) == 1.0
    assert sum(each["device"] for each in found) == 1.0
    for each in found:
        assert each["blocks"] <= 4.5 + 0.1, found
    # Master, two moments and a gradient, each float32, of a rank's half.
    assert sum(each["host"] for each in found) == pytest.approx(16.0, rel=0.01), found


@pytest.mark.slow
def test_compiled(two_ranks: Ranks) -> None:
    two_ranks(cases.compiled, "aot_eager")


@pytest.mark.slow
def test_compiled_to_code() -> None:
    ranks = Ranks(2, timeout_s=150)
    try:
        ranks(cases.compiled, "inductor")
    finally:
        ranks.stop()


@DTYPES
def test_a_model_that_the_user_sharded(dtype: torch.dtype, two_ranks: Ranks) -> None:
    two_ranks(cases.sharded_by_the_user, dtype)


@pytest.mark.medium
def test_frozen_and_thawed(two_ranks: Ranks) -> None:
    two_ranks(cases.frozen_and_thawed)
    two_ranks(cases.thawed_after_forward)
    two_ranks(cases.frozen_while_gathered)


@pytest.mark.quick(0)
@pytest.mark.parametrize("handles", ["shards", "model", "former"])
def test_frozen_and_thawed_while_gathered(handles: str, two_ranks: Ranks) -> None:
    two_ranks(cases.thawed_while_gathered, handles)


@pytest.mark.quick(0)
@pytest.mark.parametrize("then", ["forward", "backward", "state"])
@pytest.mark.parametrize("handles", ["shards", "model"])
def test_written_while_gathered(handles: str, then: str, two_ranks: Ranks) -> None:
    two_ranks(cases.written_while_gathered, handles, then)


@pytest.mark.parametrize("how, at", [("data", "forward"), ("both", "forward"), ("both", "backward")])
def test_two_writes_while_gathered_are_an_error(how: str, at: str, two_ranks: Ranks) -> None:
    for first, second in two_ranks(cases.written_twice_while_gathered, how, at):
        assert first.startswith("ParameterError: parameter extra.weight was written"), first
        assert second == ""


def test_nothing_is_left_of_an_engine_that_never_ran(two_ranks: Ranks) -> None:
    two_ranks(cases.destroyed_before_its_first_forward)


def test_a_gradient_that_was_assigned_is_refused(two_ranks: Ranks) -> None:
    for said in two_ranks(cases.assigned_gradient):
        assert said.startswith("GradientError: the .grad of parameter embedding.weight, of which each rank has a shard")
        assert said.endswith("to set a gradient use longshore.utils.safe_set_full_grad()")


def test_parameters_from_before_are_empty(two_ranks: Ranks) -> None:
    two_ranks(cases.old_parameters_are_empty)


@pytest.mark.parametrize(
    "what, says",
    [
        ("scalar", "ValueError: parameter temperature has no dimension, and FSDP2 cannot shard it; give it the shape"),
        ("strides", "ValueError: parameter extra.weight is not contiguous (its strides are (1, 3)), and FSDP2 cannot"),
        ("class", "ValueError: wrap_policy names Blok, and the model has no module of that class"),
        ("leaf", "ValueError: leaf_module names Blok, nothing, and the model has no such module; correct it"),
        ("stage", "ValueError: wrap_policy is for stage 3, and the stage is 2; leave it out"),
        (
            "dtypes",
            "ValueError: parameters blocks.0.up.weight (torch.bfloat16) and blocks.0.down.weight (",
        ),
        ("columns", "ValueError: parameter weight is placed as (Shard(dim=1),) on DeviceMesh("),
        (
            "part",
            "ValueError: fully_shard was applied to a part of the model, and parameter embedding.weight is not",
        ),
        ("dtype", "ValueError: parameter embedding.weight is torch.float32 and the configuration wants torch.bfloat16"),
        (
            "stage 2",
            "ValueError: parameter embedding.weight is a DTensor: fully_shard was applied to the model, and",
        ),
    ],
)
def test_refused(what: str, says: str, two_ranks: Ranks) -> None:
    for said in two_ranks(cases.refused, what):
        assert said.startswith(says), said


def test_a_parameter_without_elements_is_used(two_ranks: Ranks) -> None:
    two_ranks(cases.parameter_without_elements)


def test_a_policy_below_stage_3_is_refused() -> None:
    with pytest.raises(ConfigError, match="wrap_policy is for stage 3, and the stage is 2"):
        cases.config_of(stage=2, wrap_policy=["Block"])
    assert cases.config_of(stage=2, wrap_policy="auto").wrap_policy == "auto"


@pytest.mark.parametrize("after_it", [False, True])
@pytest.mark.parametrize("early", [True, False])
def test_hooks_on_gradients_are_refused(early: bool, after_it: bool, two_ranks: Ranks) -> None:
    """They would not run, and the weights would silently be others."""
    for (said,) in two_ranks(cases.hooked, early, after_it):
        assert ("ValueError: " if early else "GradientError: ") in said
        assert "parameter blocks.1.up.weight has a hook on its gradient, which comes in another tensor" in said

"""``longshore.AdamW(model.parameters())`` after ``fully_shard``."""

from __future__ import annotations

import pytest
import torch
from optim import fsdp_cases as cases
from ranks import Ranks

pytestmark = pytest.mark.needs_torch("FSDP2 over gloo")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.mark.covering(1)
@pytest.mark.quick(0)
@DTYPES
@pytest.mark.parametrize("clip", ["none", "ours", "torch"])
def test_two_ranks_train_like_plain_torch(dtype: torch.dtype, clip: str, two_ranks: Ranks) -> None:
    two_ranks(cases.train, dtype, False, clip, (2,))


@pytest.mark.covering(2)
@pytest.mark.quick(1)
@DTYPES
@pytest.mark.parametrize("clip", ["none", "ours"])
@pytest.mark.parametrize("ahead", [False, True])
def test_gradients_that_leave_during_backward(dtype: torch.dtype, clip: str, ahead: bool, two_ranks: Ranks) -> None:
    for found in two_ranks(cases.train, dtype, True, clip, (2,), ahead=ahead):
        assert (found["kept"] > 0) == (ahead and clip == "none")


def test_discarding_and_replacing_what_has_left(two_ranks: Ranks) -> None:
    two_ranks(cases.discarded)


def test_a_model_that_is_converted_while_the_host_has_gradients(two_ranks: Ranks) -> None:
    two_ranks(cases.converted)


@pytest.mark.slow
def test_four_ranks_in_a_mesh_of_two_dimensions(four_ranks: Ranks) -> None:
    """Replicas of shards: within a few units in the last place, since four numbers are added in another order."""
    for found in four_ranks(cases.train, torch.float32, False, "ours", (2, 2)):
        assert found["largest"] <= 1e-6


@pytest.mark.parametrize("by_torch", [False, True])
def test_state_is_saved_and_loaded(by_torch: bool, two_ranks: Ranks) -> None:
    two_ranks(cases.saved_and_loaded, by_torch)


def test_a_whole_state_is_cut(two_ranks: Ranks) -> None:
    two_ranks(cases.whole_state_is_cut)


@pytest.mark.quick(0)
@pytest.mark.parametrize(("kind", "release"), [("SGD", False), ("SGD", True), ("Adagrad", True), ("Lion", False)])
def test_other_rules_step_shards_as_the_whole(kind: str, release: bool, two_ranks: Ranks) -> None:
    two_ranks(cases.other_rule, kind, release)

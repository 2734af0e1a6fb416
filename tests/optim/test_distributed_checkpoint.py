"""Checkpoints that ``torch.distributed.checkpoint`` writes for ``torch.optim`` load into longshore, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from optim import distributed_checkpoint_cases as cases
from ranks import Ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import longshore

PLAIN: Any = None
"""``state_dict()`` without torch's functions for it."""
FULL, FLAT = {"full_state_dict": True}, {"flatten_optimizer_state_dict": True}
OPTIONS = [PLAIN, {}, FULL, FLAT, {**FULL, "cpu_offload": True}]
"""torch cannot load what it gets with ``FULL`` and ``FLAT`` together, not even into its own optimizers."""
BOTH_WAYS = [(torch.optim, longshore), (longshore, torch.optim), (longshore, longshore)]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("source", "target"), BOTH_WAYS, ids=["torch-ours", "ours-torch", "ours-ours"])
def test_a_run_goes_on(kind: str, options: Any, source: Any, target: Any, tmp_path: Path) -> None:
    for one, other in cases.exchange(tmp_path, source, target, kind, options):
        assert torch.equal(one, other)


@pytest.mark.parametrize("options", [PLAIN, FLAT, FULL], ids=str)
def test_masters_go_from_ours_to_ours(options: Any, tmp_path: Path) -> None:
    for one, other in cases.exchange(tmp_path, longshore, longshore, "AdamW", options, dtype=torch.bfloat16):
        assert torch.equal(one, other)


@pytest.mark.parametrize("options", [PLAIN, FLAT], ids=str)
def test_a_bf16_checkpoint_of_torch_has_no_masters(options: Any, tmp_path: Path) -> None:
    how = {"dtype": torch.bfloat16, "partly": True, "steps": False}
    pairs = cases.exchange(tmp_path, torch.optim, longshore, "AdamW", options, **how)
    assert pairs and all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.needs_torch("set_state_dict() of fewer entries")
def test_masters_of_what_was_loaded_without_them_are_its_parameters(tmp_path: Path) -> None:
    model, optimizer = cases.make(torch.optim, "AdamW", torch.bfloat16)
    cases.step(model, optimizer)
    options = StateDictOptions(**FLAT)
    state, of_optimizer = get_state_dict(model, optimizer, options=options)
    other, its = cases.make(longshore, "AdamW", torch.bfloat16, seed=5)
    set_state_dict(other, its, model_state_dict=state, optim_state_dict=of_optimizer, options=options)
    cases.step(other, its)
    expected, oracle = cases.make(longshore, "AdamW", torch.bfloat16, seed=5)
    expected.load_state_dict(model.state_dict())
    oracle.load_state_dict(optimizer.state_dict())
    cases.step(expected, oracle)
    for one, two in zip(other.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(its.state[one]["master"], oracle.state[two]["master"])


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", [FLAT, {}, FULL, {"cpu_offload": True}, {**FLAT, "cpu_offload": True}], ids=str)
@pytest.mark.parametrize("ours_saves", [False, True])
def test_sharded_models(ours_saves: bool, options: Any, two_ranks: Ranks, tmp_path: Path) -> None:
    """``FLAT`` is what torchtitan saves."""
    two_ranks(cases.sharded, str(tmp_path), ours_saves, options)


def test_masters_of_a_sharded_model(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(cases.sharded_masters, str(tmp_path))


def test_groups_have_the_keys_of_torchs() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    for kind in cases.KINDS:
        theirs = getattr(torch.optim, kind)([parameter]).param_groups[0]
        assert getattr(longshore, kind)([parameter]).param_groups[0].keys() == theirs.keys()


@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
def test_bias_correction_is_on_where_a_state_does_not_say(kind: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    make = getattr(longshore, kind)
    saved = make([parameter]).state_dict()
    off = make([parameter], bias_correction=False)
    assert off.param_groups[0]["bias_correction"] is False
    with_it = off.state_dict()
    off.load_state_dict(saved)
    assert "bias_correction" not in off.param_groups[0]
    on = make([parameter])
    on.load_state_dict(with_it)
    assert on.param_groups[0]["bias_correction"] is False


def test_what_was_loaded_is_kept_once_and_can_be_saved_again() -> None:
    """torch names parameters in what it loads; these names are not entries of the user's own."""

    def make() -> tuple[torch.nn.Linear, longshore.AdamW]:
        model = torch.nn.Linear(4, 2)
        return model, longshore.AdamW(model.parameters())

    model, optimizer = make()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    values, state = get_state_dict(model, optimizer)
    model, optimizer = make()
    set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=state)
    assert list(optimizer.state_dict()["state"]) == [0, 1]
    assert list(get_state_dict(model, optimizer)[1]["state"]) == ["weight", "bias"]

"""What an optimizer accepts, it can save, and load again: over all settings of ``Offload`` and all options."""

from __future__ import annotations

import math
import tempfile
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import longshore
from longshore import ConfigError, Offload, SimulatedTransfer

WHOLE = st.one_of(
    st.integers(-3, 3), st.integers(), st.sampled_from([2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 2**200])
)
REAL = st.one_of(
    st.floats(0.0, 1.0), st.sampled_from([0, 1, -1, 1e308, 5e-324, math.inf, math.nan, 2**80, True]), st.floats()
)
OFFLOADS = st.fixed_dictionaries(
    {},
    optional={
        "states": st.sampled_from(["fp32", "bf16", "8bit", "int8"]),
        "states_seed": WHOLE,
        "tile_numel": st.one_of(st.none(), st.integers(-1, 300)),
        "threads": st.integers(0, 2),
        "device": st.sampled_from(["cpu", "none", "disk"]),
        "speculation_memory": st.sampled_from([0, "100%", "1MiB", "auto", -1, "much"]),
        "ratio": st.one_of(st.floats(-0.1, 1.1), st.sampled_from([0.0, 0.5, 1.0])),
        "detect_writes": st.booleans(),
        "transfer": st.sampled_from([None, "simulated"]),
    },
)
OPTIONS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "AdamW": {"lr": REAL, "betas": st.tuples(REAL, REAL), "eps": REAL, "weight_decay": REAL, "maximize": st.booleans()},
    "Adam": {"lr": REAL, "betas": st.tuples(REAL, REAL), "eps": REAL, "weight_decay": REAL},
    "SGD": {"lr": REAL, "momentum": REAL, "dampening": REAL, "weight_decay": REAL, "nesterov": st.booleans()},
    "Lion": {"lr": REAL, "betas": st.tuples(REAL, REAL), "weight_decay": REAL},
    "Adagrad": {"lr": REAL, "lr_decay": REAL, "eps": REAL, "initial_accumulator_value": REAL},
    "Muon": {"lr": REAL, "momentum": REAL, "nesterov": st.booleans(), "ns_steps": WHOLE, "weight_decay": REAL},
}
KINDS = st.sampled_from(sorted(OPTIONS)).flatmap(
    lambda kind: st.tuples(st.just(kind), st.fixed_dictionaries({}, optional=OPTIONS[kind]))
)
REFUSED = (ValueError, TypeError, OverflowError)


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4, bias=False))


def made(kind: str, options: dict[str, Any], offload: dict[str, Any], release: bool, model: nn.Module) -> Any:
    if offload.get("transfer") == "simulated":
        offload = {**offload, "transfer": SimulatedTransfer(max_delay_s=0.0)}
    parameters = [{"params": [each], "use_muon": each.dim() == 2} for each in model.parameters()]
    return getattr(longshore, kind)(
        parameters if kind == "Muon" else model.named_parameters(),
        **options,
        release_gradients=release,
        offload=Offload(**offload),
    )


def step(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(2, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def same(left: Any, right: Any) -> bool:
    """Whether two nested states are equal, bit for bit."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left.nan_to_num(7.0), right.nan_to_num(7.0))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right or (left != left and right != right)


@pytest.mark.medium
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(kind=KINDS, offload=OFFLOADS, release=st.booleans())
@example(kind=("AdamW", {}), offload={"states": "bf16", "states_seed": 2**63 - 1}, release=False)
@example(kind=("AdamW", {}), offload={"states": "bf16", "states_seed": 2**63}, release=False)
@example(kind=("AdamW", {}), offload={"states": "bf16", "states_seed": -1}, release=False)
@example(kind=("SGD", {"lr": 1, "momentum": 1}), offload={"states": "8bit"}, release=True)
def test_what_is_accepted_is_saved_and_loaded(
    kind: tuple[str, dict[str, Any]], offload: dict[str, Any], release: bool
) -> None:
    model = network()
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        try:
            optimizer = made(*kind, offload, release, model)
        except REFUSED:
            return
        step(model, optimizer)
        before, weights = optimizer.state_dict(), [each.detach().clone() for each in model.parameters()]
        longshore.save(folder, model, optimizer, "t")
        other_model = network()
        other = made(*kind, offload, release, other_model)
        longshore.load(folder, other_model, other)
        assert same(other.state_dict(), before)
        assert same([each.detach() for each in other_model.parameters()], weights)
        for pair in ((model, optimizer), (other_model, other)):
            step(*pair)
        assert same(other.state_dict(), optimizer.state_dict())
        for each in (optimizer, other):
            each.close()


@pytest.mark.parametrize("seed", [-1, -(2**40), 2**63, 2**64, 10**4400, 1.5, True, "1"], ids=range(8))
def test_seeds_that_no_checkpoint_can_have_are_refused(seed: Any) -> None:
    with pytest.raises(ValueError, match=r"states_seed is an integer from 0 to 2\*\*63 - 1, not"):
        Offload(states="bf16", states_seed=seed)
    if isinstance(seed, int) and not isinstance(seed, bool):
        with pytest.raises(ConfigError, match=r"states_seed.*must be an integer of at least 0"):
            longshore.Config(states="bf16", states_seed=seed)


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64])
def test_they_are_refused_in_a_file(seed: int) -> None:
    offload = {"device": "cpu", "states": "8bit", "states_seed": seed}
    file = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, "offload_optimizer": offload}}
    with pytest.raises(ConfigError, match=rf"states_seed = {seed}: must be an integer of at least 0"):
        longshore.initialize(model=network(), config={**file, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}})

"""``copy.deepcopy``, ``pickle`` and ``torch.save`` of optimizers, and of schedulers and models that hold one."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support import KIND_NAMES, KINDS, Kind, loss_of, same_weights, simulated, small_model, twins
from torch import nn

import longshore
from longshore.engine.optimizers import from_client
from longshore.engine.sharded_offload import ShardedOffload
from longshore.errors import LongshoreError
from longshore.store.rounds import ReductionSettings


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, dtype: torch.dtype = torch.float32) -> None:
    for step in steps:
        loss_of(model, step, dtype).backward()
        optimizer.step()
        optimizer.zero_grad()


def through_torch_save(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value)), through_torch_save]
WAYS_NAMED = pytest.mark.parametrize("copied", WAYS, ids=["deepcopy", "pickle", "save"])


@pytest.mark.quick(0)
@WAYS_NAMED
@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES)
def test_a_copy_goes_on_with_the_copied_parameters(kind: Kind, copied: Any) -> None:
    dtype = torch.bfloat16
    model = small_model(dtype)
    first, *others = model.parameters()
    optimizer = kind.make([{"params": [first], "lr": 1e-3, "mine": "x"}, {"params": others}], offload=simulated())
    train(model, optimizer, range(3), dtype)
    other_model, other = copied((model, optimizer))
    assert type(other) is type(optimizer)
    for group, theirs in zip(optimizer.param_groups, other.param_groups, strict=True):
        assert {**group, "params": None} == {**theirs, "params": None}
    held = [parameter for group in other.param_groups for parameter in group["params"]]
    assert all(a is b for a, b in zip(held, other_model.parameters(), strict=True))
    before = copy.deepcopy(other.state_dict()["state"])
    train(model, optimizer, range(3, 6), dtype)
    for key, state in other.state_dict()["state"].items():  # the first one's steps changed nothing in the copy
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(before[key][n])) for n, v in state.items())
    train(other_model, other, range(3, 6), dtype)
    assert same_weights(model, other_model)


@WAYS_NAMED
def test_settings_are_copied(copied: Any) -> None:
    model = small_model(torch.bfloat16)
    transfer = longshore.SimulatedTransfer(seed=1, max_delay_s=0.0)
    offload = longshore.Offload(64, threads=1, cpu_set=[0], speculation_memory="50%", transfer=transfer)
    optimizer = longshore.AdamW(model.named_parameters(), release_gradients=True, offload=offload)
    optimizer.set_loss_scale(8.0)
    train(model, optimizer, range(2), torch.bfloat16)
    other_model, other = copied((model, optimizer))
    found = other._core.members.offload
    assert (found.tile_numel, found.threads, found.cpu_set, found.speculation_memory) == (64, 1, [0], "50%")
    assert isinstance(found.transfer, longshore.SimulatedTransfer) and found.transfer is not offload.transfer
    for step in range(2, 5):
        for each, its in ((model, optimizer), (other_model, other)):
            (8 * loss_of(each, step, torch.bfloat16)).backward()
            its.clip_grad_norm_(0.1)
            its.step()
            its.zero_grad()
    assert other.speculation is not None
    assert same_weights(model, other_model)
    optimizer.close()
    train(other_model, other, range(1), torch.bfloat16)


@WAYS_NAMED
def test_a_scheduler_holds_the_copied_optimizer(copied: Any) -> None:
    loops = []
    for kind in (torch.optim.SGD, longshore.SGD):
        torch.manual_seed(0)
        each = nn.Sequential(nn.Linear(19, 32), nn.GELU(), nn.Linear(32, 16))  # torch has no scalar tail here
        optimizer = kind(each.parameters(), lr=0.1, momentum=0.9, fused=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)
        for step in range(2):
            train(each, optimizer, range(step, step + 1))
            scheduler.step()
        loops.append(copied((each, scheduler)))
    for step in range(2, 5):
        for each, scheduler in loops:
            train(each, scheduler.optimizer, range(step, step + 1))
            scheduler.step()
    assert loops[0][1].get_last_lr() == loops[1][1].get_last_lr()
    assert same_weights(loops[0][0], loops[1][0])


def test_a_copy_of_one_that_torch_steps() -> None:
    plain_model, model = twins()
    theirs = torch.optim.NAdam(plain_model.parameters())
    with pytest.warns(UserWarning, match="no kernel"):
        ours = from_client(torch.optim.NAdam(model.parameters()), release_gradients=False)
    train(plain_model, theirs, range(2))
    train(model, ours, range(2))
    (plain_model, theirs), (model, ours) = copy.deepcopy((plain_model, theirs)), copy.deepcopy((model, ours))
    train(plain_model, theirs, range(2, 4))
    train(model, ours, range(2, 4))
    assert same_weights(plain_model, model)


def test_edits_and_entries_of_users_are_copied() -> None:
    model = small_model()
    optimizer = longshore.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    first = next(model.parameters())
    optimizer.state[first]["exp_avg"].zero_()
    optimizer.state[first]["slow"] = torch.ones(3)
    optimizer.state["count"] = 7
    removed = optimizer.param_groups[0]["params"].pop()
    with torch.no_grad():
        first.data.mul_(2.0)
    other_model, other = copy.deepcopy((model, optimizer))
    assert other.state["count"] == 7
    copied = next(other_model.parameters())
    assert other.state[copied]["exp_avg"].eq(0).all() and torch.equal(other.state[copied]["slow"], torch.ones(3))
    *_, last = other_model.parameters()
    assert last is not removed and all(last is not each for each in other.param_groups[0]["params"])
    for each, its in ((model, optimizer), (other_model, other)):
        *_, last = each.parameters()
        its.param_groups[0]["params"].append(last)
        train(each, its, range(2, 4))
    assert same_weights(model, other_model)


def test_what_cannot_be_copied_is_refused() -> None:
    model = small_model()
    optimizer = longshore.AdamW(model.parameters())
    with pytest.raises(TypeError, match=r"copy\.deepcopy"):
        copy.copy(optimizer)
    loss_of(model, 0).backward()
    optimizer.clip_grad_norm_(1e-3)
    with pytest.raises(LongshoreError, match="clipped the gradients of this window"):
        copy.deepcopy(optimizer)
    optimizer.step()
    copy.deepcopy(optimizer)
    several = {"group": None, "reduction": ReductionSettings(1, 1), "gather_numel": 1}
    optimizer._core.members.offload = ShardedOffload.over(longshore.Offload(), **several)
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"of an engine .* engine\.save_checkpoint"):
            attempt(optimizer)


@WAYS_NAMED
def test_the_state_of_a_parameter_out_of_its_group_is_copied_and_goes_on_when_it_is_back(copied: Any) -> None:
    model, plain = small_model(torch.bfloat16), small_model(torch.bfloat16)
    first, *others = model.parameters()
    optimizer = longshore.AdamW([{"params": [first]}, {"params": others}], offload=simulated())
    train(model, optimizer, range(2), torch.bfloat16)
    optimizer.param_groups[0]["params"].pop()
    before = {key: torch.as_tensor(value).clone() for key, value in optimizer.state[first].items()}
    other_model, other = copied((model, optimizer))
    moved = next(iter(other_model.parameters()))
    assert moved in other.state and any(key is moved for key in other.state)
    assert all(torch.equal(torch.as_tensor(other.state[moved][key]), value) for key, value in before.items())
    for each, parameter in ((optimizer, first), (other, moved)):
        each.param_groups[0]["params"].append(parameter)
    for each, its in ((model, optimizer), (other_model, other)):
        train(each, its, range(2, 4), torch.bfloat16)
    assert same_weights(model, other_model)
    twin = longshore.AdamW([{"params": [next(iter(plain.parameters()))]}, {"params": [*plain.parameters()][1:]}])
    train(plain, twin, range(4), torch.bfloat16)
    assert same_weights(model, plain)


def test_a_state_of_a_tensor_that_is_in_no_group_is_there_until_a_state_is_loaded() -> None:
    model = small_model()
    optimizer = longshore.AdamW(model.parameters())
    train(model, optimizer, range(1))
    other = nn.Parameter(torch.ones(3))
    optimizer.state[other] = {"mine": 1}
    optimizer.state[other]["mine"] = 2
    assert optimizer.state[other] == {"mine": 2} and len(optimizer.state) == 1 + len([*model.parameters()])
    assert len(optimizer.state_dict()["state"]) == len([*model.parameters()])  # torch's ends with a KeyError
    del optimizer.state[other]
    assert other not in optimizer.state
    optimizer.state[other] = {"mine": 1}
    optimizer.load_state_dict(optimizer.state_dict())
    assert other not in optimizer.state


@WAYS_NAMED
def test_an_optimizer_without_parameters_and_its_order_are_copied(copied: Any) -> None:
    model = small_model()
    first, second, third, *_ = model.parameters()
    optimizer = longshore.AdamW([first, second, third])
    assert "step" not in optimizer.state[third]
    for _ in range(2):
        first.grad = torch.ones_like(first)
        optimizer.step()
    _, other = copied((model, optimizer))
    places = [
        [[id(p) for p in each.param_groups[0]["params"]].index(id(key)) for key in each.state]
        for each in (optimizer, other)
    ]
    assert places[0] == places[1] == [2, 0]
    optimizer.param_groups[0]["params"].clear()
    moved, other = copied((model, optimizer))
    assert other.state[next(moved.parameters())]["step"] == 2


def test_a_state_that_comes_before_its_parameter() -> None:
    """Scripts that grow a model set the state of what they add."""
    found = []
    for kind, options in ((torch.optim.AdamW, {"fused": True}), (longshore.AdamW, {})):
        old, new = (nn.Parameter(torch.zeros(16)) for _ in range(2))
        optimizer = kind([old], lr=0.1, **options)
        old.grad = torch.ones(16)
        optimizer.step()
        optimizer.state[new] = {
            "step": torch.tensor(5.0),
            **{name: torch.ones(16) for name in ("exp_avg", "exp_avg_sq")},
        }
        optimizer.add_param_group({"params": [new]})
        new.grad = torch.ones(16)
        optimizer.step()
        assert float(optimizer.state[new]["step"]) == 6 and len(optimizer.state) == 2
        del optimizer.state[new]
        assert new not in optimizer.state
        found.append(new.detach())
    assert torch.equal(*found)


@WAYS_NAMED
@pytest.mark.parametrize("release", [False, True])
def test_a_copy_without_a_parameter_does_nothing_until_one_comes(copied: Any, release: bool, tmp_path: Path) -> None:
    """As torch's: a pruned group is empty for a while."""
    model, plain = small_model(), small_model()
    optimizer = longshore.AdamW(model.parameters(), lr=1e-2, release_gradients=release)
    optimizer.param_groups[0]["params"].clear()
    model, optimizer = copied((model, optimizer))
    optimizer.step()
    assert optimizer.clip_grad_norm_(1.0) == optimizer.grad_norm() == 0.0
    optimizer.expect_backwards(2)
    longshore.save(tmp_path, model, optimizer)
    longshore.load(tmp_path, model, optimizer)
    assert optimizer.state_dict()["state"] == {} and sum(optimizer.host_bytes().values()) == 0
    optimizer.param_groups[0]["params"].extend(model.parameters())
    built_with_them = longshore.AdamW(plain.parameters(), lr=1e-2)
    for each, its in ((model, optimizer), (plain, built_with_them)):
        train(each, its, range(2))
    assert same_weights(model, plain)

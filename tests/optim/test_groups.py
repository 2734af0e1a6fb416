"""Parameters that users take out of their groups, put back, or give to another optimizer: as in torch."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import longshore
from longshore.errors import GradientError, ParameterError

RELEASE = pytest.mark.parametrize("release", [False, True], ids=["kept", "released"])


def _pair(release: bool, **options: Any) -> tuple[list[nn.Parameter], Any, list[nn.Parameter], Any]:
    """The parameters and optimizer of ours, and those of torch."""
    values = [torch.randn(4, 8, generator=torch.Generator().manual_seed(number)) for number in range(3)]
    ours, theirs = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    return (
        ours,
        longshore.AdamW(ours, lr=0.1, release_gradients=release, **options),
        theirs,
        torch.optim.AdamW(theirs, lr=0.1, fused=True, **options),
    )


def _backward(parameters: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sum((each * torch.randn(each.shape, generator=generator)).sum() for each in parameters).backward()  # pyright: ignore


def _same(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


@RELEASE
def test_a_parameter_that_was_taken_out_is_left_alone(release: bool) -> None:
    ours, optimizer, theirs, plain = _pair(release)
    for step in range(5):
        if step == 1:
            for each in (optimizer, plain):
                each.param_groups[0]["params"].pop(1)
        if step == 3:
            for each, parameters in ((optimizer, ours), (plain, theirs)):
                each.param_groups[0]["params"].append(parameters[1])
        for each, parameters in ((optimizer, ours), (plain, theirs)):
            _backward(parameters, step)
            norm = each.grad_norm() if each is optimizer else _norm(each)
            each.step()
            if each is optimizer:
                measured = norm
            else:
                assert torch.equal(measured, norm)
        _same(ours, theirs)
        if step in (1, 2):
            assert ours[1].grad is not None and theirs[1].grad is not None
            assert torch.equal(ours[1].grad, theirs[1].grad)  # of both backwards: nobody's to clear
        if step != 2:
            optimizer.zero_grad()
            plain.zero_grad()
        else:
            for each in (*ours, *theirs):
                each.grad = None


def _norm(optimizer: torch.optim.Optimizer) -> Tensor:
    gradients = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    total = sum(float(each.double().pow(2).sum()) for each in gradients)
    return torch.tensor(total, dtype=torch.float64).sqrt().float()


@RELEASE
def test_another_optimizer_takes_it_over(release: bool) -> None:
    ours, optimizer, theirs, plain = _pair(release)
    others = longshore.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), torch.optim.SGD([torch.zeros(1)], lr=1.0)
    for step in range(4):
        for each, parameters, other in ((optimizer, ours, others[0]), (plain, theirs, others[1])):
            if step == 1:
                taken = each.param_groups[0]["params"].pop(0)
                other.add_param_group({"params": [taken]})
            _backward(parameters, step)
            each.step()
            each.zero_grad()
            other.step()
            other.zero_grad()
        _same(ours, theirs)
    before = ours[0].detach().clone()
    _backward(ours, 9)
    optimizer.zero_grad()
    others[0].step()
    assert not torch.equal(ours[0], before)


def test_a_group_without_names_is_added_where_torch_takes_it() -> None:
    """torch wants names for all parameters or for none; those that the user did not give do not count."""
    values = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    first, named = values[0], [("first", values[0])]
    names = {id(first): "first"}
    for optimizer in (
        torch.optim.AdamW(named),
        longshore.AdamW(named),
        longshore.from_client(torch.optim.AdamW(named)),
        copy.deepcopy(longshore.AdamW(named)),
    ):
        with pytest.raises(ValueError, match="with/without names"):
            optimizer.add_param_group({"params": values[1:]})
        assert len(optimizer.param_groups) == 1
    by_us = longshore.from_client(torch.optim.AdamW([first]), names=names)
    by_us.add_param_group({"params": values[1:2]})
    longshore.from_client(by_us).add_param_group({"params": values[2:]})


def test_clipping_counts_what_is_in_the_groups() -> None:
    ours, optimizer, theirs, plain = _pair(False)
    for each in (optimizer, plain):
        each.param_groups[0]["params"].pop(0)
    for parameters in (ours, theirs):
        _backward(parameters, 0)
        assert parameters[0].grad is not None
        parameters[0].grad *= 1e6
    optimizer.clip_grad_norm_(0.5)
    found = _norm(plain)
    for each in theirs[1:]:
        assert each.grad is not None
        each.grad *= torch.clamp(0.5 / (found + 1e-6), max=1.0)
    optimizer.step()
    plain.step()
    _same(ours, theirs)


def test_in_the_middle_of_a_window_is_an_error() -> None:
    ours, optimizer, _, _ = _pair(True)
    before = [each.detach().clone() for each in ours]
    _backward(ours, 0)
    optimizer.param_groups[0]["params"].pop(1)
    for call in (optimizer.grad_norm, optimizer.step):
        with pytest.raises(GradientError, match=r"parameter 0\.1 was taken out of its group .* between windows"):
            call()
    _same([nn.Parameter(each) for each in before], ours)
    optimizer.zero_grad()
    for turn in range(2):  # as in torch, what is out of the group keeps its gradient; only a placeholder is left of it
        _backward(ours, 1 + turn)
        optimizer.step()
        with pytest.raises(longshore.LongshoreError, match=r"0\.1.*its gradient is on the host"):
            torch.optim.SGD([ours[1]]).step()
    assert torch.equal(ours[1], before[1]) and not torch.equal(ours[0], before[0])


def test_a_state_that_is_kept_does_not_keep_the_hooks_at_work() -> None:
    ours, optimizer, _, _ = _pair(True)
    _backward(ours, 0)
    optimizer.step()
    state = optimizer.state[ours[0]]
    del optimizer
    gc.collect()
    _backward(ours, 1)
    assert all(type(each.grad) is Tensor for each in ours)
    assert not any(each._post_accumulate_grad_hooks for each in ours)
    assert state["step"] == 1


@RELEASE
def test_a_parameter_that_is_put_into_a_group_twice_is_named_and_nothing_is_stepped(release: bool) -> None:
    ours, optimizer, _, _ = _pair(release)
    before = [parameter.detach().clone() for parameter in ours]
    optimizer.param_groups[0]["params"].append(ours[1])
    _backward(ours, 0)
    with pytest.raises(ParameterError, match=r"parameter 0\.1 is in the parameter groups twice; .*\[1\] or .*\[3\]$"):
        optimizer.step()
    assert all(torch.equal(parameter, value) for parameter, value in zip(ours, before, strict=True))
    optimizer.param_groups[0]["params"].pop()
    optimizer.step()
    assert not any(torch.equal(parameter, value) for parameter, value in zip(ours, before, strict=True))


@RELEASE
@pytest.mark.parametrize("when", ["before any step", "between windows", "within a window", "after a step without it"])
def test_a_parameter_that_is_moved_to_a_new_group_keeps_its_state(release: bool, when: str) -> None:
    ours, optimizer, theirs, plain = _pair(release)
    for step in range(5):
        for each, parameters in ((optimizer, ours), (plain, theirs)):
            if when == "within a window":
                _backward(parameters, step)
            if step == (0 if when == "before any step" else 2):
                group = each.param_groups[0]
                moved, group["params"] = group["params"][1:], group["params"][:1]
                if when == "after a step without it":
                    _backward(parameters, 9)
                    each.step()
                    for parameter in parameters:
                        parameter.grad = None
                each.add_param_group({"params": moved, "lr": 1.0, "weight_decay": 0.5})
            if when != "within a window":
                _backward(parameters, step)
            each.step()
            each.zero_grad()
        _same(ours, theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert optimizer.state[one]["step"] == plain.state[other]["step"]
        assert torch.equal(optimizer.state[one]["exp_avg"], plain.state[other]["exp_avg"])
    saved = optimizer.state_dict()
    assert [group["params"] for group in saved["param_groups"]] == [[0], [1, 2]]
    plain.load_state_dict(saved)
    copied = copy.deepcopy(optimizer)
    assert [len(group["params"]) for group in copied.param_groups] == [1, 2]


@RELEASE
def test_a_moved_parameter_without_its_state_begins_anew(release: bool) -> None:
    ours, optimizer, theirs, plain = _pair(release)
    for step in range(4):
        for each, parameters in ((optimizer, ours), (plain, theirs)):
            if step == 2:
                moved = each.param_groups[0]["params"].pop(1)
                del each.state[moved]
                new = nn.Parameter(torch.full((3,), 2.0))
                parameters.append(new)
                each.add_param_group({"params": [new, moved], "lr": 1e-3})
            _backward(parameters, step)
            each.step()
            each.zero_grad()
        _same(ours, theirs)
    assert optimizer.state[ours[1]]["step"] == 2 == plain.state[theirs[1]]["step"]


@RELEASE
def test_a_group_is_taken_out_and_given_back(release: bool) -> None:
    ours, optimizer, theirs, plain = _pair(release)
    for step in range(4):
        for each, parameters in ((optimizer, ours), (plain, theirs)):
            if step == 2:
                group = each.param_groups.pop()
                each.add_param_group({**group, "lr": 1e-3})
                with pytest.raises(ValueError, match="more than one parameter group"):
                    each.add_param_group({"params": [parameters[0]]})
            _backward(parameters, step)
            each.step()
            each.zero_grad()
        _same(ours, theirs)
    assert len(optimizer.param_groups) == 1


@RELEASE
@pytest.mark.parametrize("copies", [False, True], ids=["in place", "copied by given streams"])
@pytest.mark.parametrize("added", [False, True], ids=["filled by hand", "add_param_group"])
def test_groups_that_are_empty_at_first_are_filled_later(release: bool, added: bool, copies: bool) -> None:
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.ones(32) * n) for n in (1, 2)] for _ in range(2))
    offload = longshore.Offload(transfer=longshore.SimulatedTransfer(0.0) if copies else None)
    optimizer = longshore.AdamW([{"params": []}, {"params": [], "lr": 0.1}], release_gradients=release, offload=offload)
    plain = torch.optim.AdamW([{"params": []}, {"params": [], "lr": 0.1}], fused=True)
    assert sum(optimizer.host_bytes().values()) == 0
    for each, own in ((optimizer, ours), (plain, theirs)):
        schedule = torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5)
        each.zero_grad()
        each.step()
        schedule.step()
        assert each.state_dict()["state"] == {} and len(each.state) == 0
        each.load_state_dict(each.state_dict())
        if added:
            each.add_param_group({"params": own, "lr": 0.2})
        else:
            for group, parameter in zip(each.param_groups, own, strict=True):
                group["params"].append(parameter)
        for step in range(3):
            _backward(own, step)
            each.step()
            each.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert not torch.equal(ours[0], torch.ones(32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_is_saved_without_what_is_out_of_the_groups(dtype: torch.dtype) -> None:
    """torch's state_dict() is a KeyError then, which names nothing."""
    parameters = [nn.Parameter(torch.ones(4, dtype=dtype)) for _ in range(2)]
    optimizer = longshore.AdamW(parameters)
    for each in parameters:
        each.grad = torch.ones_like(each)
    optimizer.step()
    out = optimizer.param_groups[0]["params"].pop(0)
    saved = optimizer.state_dict()
    assert saved["state"].keys() == {0} and len(saved["param_groups"][0]["params"]) == 1
    assert out in optimizer.state and len(optimizer.state) == 2, "as in torch, its state is still there"
    before = optimizer.state[parameters[1]]["exp_avg"].clone()
    optimizer.load_state_dict(copy.deepcopy(saved))
    assert torch.equal(optimizer.state[parameters[1]]["exp_avg"], before)
    plain = torch.optim.AdamW([parameters[1]])
    plain.load_state_dict(optimizer.state_dict())
    assert torch.equal(plain.state[parameters[1]]["exp_avg"].float(), before.to(dtype).float())

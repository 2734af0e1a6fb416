"""Parameters that are moved, converted, materialized or replaced after the optimizer was built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import KINDS, loss_of, same_weights, simulated, small_model
from torch import Tensor, nn

import longshore

MODES = pytest.mark.parametrize("release", [False, True])


def trained(model: nn.Module, optimizer: Any, steps: int, dtype: torch.dtype) -> nn.Module:
    for step in range(steps):
        loss_of(model, step, dtype).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@MODES
def test_a_model_converted_before_the_first_step(release: bool, dtype: torch.dtype, staged: bool) -> None:
    models = small_model(), small_model()
    results = []
    for model, first in zip(models, (True, False), strict=True):
        if first:
            model.to(dtype)
        optimizer = KINDS[0].make(
            model.parameters(), release_gradients=release, offload=simulated() if staged else longshore.Offload()
        )
        if not first:
            model.to(dtype)
        results.append(trained(model, optimizer, 3, dtype))
    assert same_weights(*results)


@pytest.mark.parametrize("fails", [False, True])
def test_all_parameters_replaced_in_the_middle_of_a_window(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of the former ones are theirs, and so is a failure to take one."""
    former, present = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = longshore.AdamW([former], lr=0.1, release_gradients=True)
    with monkeypatch.context() as patched:
        if fails:
            patched.setattr(optimizer._core.members.store, "arrive", lambda *_: 1 / 0)
        former.sum().backward()
    optimizer.param_groups[0]["params"][:] = [present]
    optimizer.step()  # there is no gradient
    assert torch.equal(present, torch.ones(3))
    present.sum().backward()
    optimizer.step()
    plain = nn.Parameter(torch.ones(3))
    twin = torch.optim.AdamW([plain], lr=0.1)
    plain.sum().backward()
    twin.step()
    assert torch.equal(present, plain) and torch.equal(former, torch.ones(3))


@MODES
def test_after_the_first_step_and_with_a_loaded_state_it_stays_an_error(release: bool) -> None:
    model = small_model()
    optimizer = longshore.AdamW(model.parameters(), release_gradients=release)
    saved = trained(model, optimizer, 1, torch.float32) and optimizer.state_dict()
    other = small_model()
    loaded = longshore.AdamW(other.parameters(), release_gradients=release)
    loaded.load_state_dict(saved)
    for each, of in ((model, optimizer), (other, loaded)):
        each.to(torch.bfloat16)
        with pytest.raises(longshore.LongshoreError, match="build the optimizer after moving or converting"):
            trained(each, of, 1, torch.bfloat16)


@MODES
def test_lazy_parameters_that_are_materialized_after(release: bool) -> None:
    results = []
    for lazy in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyLinear(16), nn.LazyLinear(4))
        data = torch.randn(8, 3)
        if not lazy:
            model(data)
        optimizer: Any = longshore.AdamW(model.parameters(), lr=0.1, release_gradients=release)
        if lazy:
            with pytest.raises(longshore.ParameterError, match=r"0\.0 is lazy"):
                optimizer.step()
            torch.manual_seed(0)
            torch.randn(8, 3)
            model(data)
        for _ in range(3):
            model(data).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(model)
    assert same_weights(*results)


def replaced(optimizer: Any, group: dict[str, Any], change: Callable[[Tensor], Tensor]) -> nn.Parameter:
    """Replace a group's parameter and change its states, as scripts of Gaussian splatting do."""
    old = group["params"][0]
    stored = optimizer.state.get(old, None)
    for name in ("exp_avg", "exp_avg_sq"):
        stored[name] = change(stored[name])
    del optimizer.state[old]
    group["params"][0] = new = nn.Parameter(change(old.detach()).requires_grad_())
    optimizer.state[new] = stored
    return new


def grown(values: Tensor) -> Tensor:
    return torch.cat([values, torch.zeros_like(values)])


def pruned(values: Tensor) -> Tensor:
    return values[torch.arange(len(values)) % 2 == 0]


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("staged", [False, True])
def test_parameters_that_grow_and_are_pruned_with_their_states(release: bool, staged: bool) -> None:
    offload = simulated(tile_numel=48) if staged else longshore.Offload()
    results = []
    for make in (
        lambda groups: torch.optim.Adam(groups, lr=0.1, fused=True),
        lambda groups: longshore.Adam(groups, lr=0.1, offload=offload, release_gradients=release),
    ):
        torch.manual_seed(0)
        points = {"xyz": nn.Parameter(torch.randn(32, 4)), "color": nn.Parameter(torch.randn(32, 2))}
        optimizer = make([{"params": [each], "name": name} for name, each in points.items()])
        bytes_then = []
        for step in range(9):
            sum(each.pow(2).sum() * (1 + step) for each in points.values()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (2, 4, 6):
                for group in optimizer.param_groups:
                    points[group["name"]] = replaced(optimizer, group, grown if step == 2 else pruned)
                if isinstance(optimizer, longshore.Adam):
                    bytes_then.append(optimizer.host_bytes()["state"])
        states = [value for each in points.values() for value in optimizer.state[each].values()]
        results.append([*points.values(), *states])
        saved = optimizer.state_dict()
        assert set(saved["state"]) == {0, 1} and saved["state"][0]["exp_avg"].shape == (16, 4)
        if bytes_then:
            assert bytes_then[0] > bytes_then[1] > bytes_then[2]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_popping_a_state_and_setting_it_before_the_group_is_changed() -> None:
    results = []
    for kind in (torch.optim.AdamW, longshore.AdamW):
        old = nn.Parameter(torch.arange(16.0))
        optimizer: Any = kind([old], lr=0.1, fused=True)
        for parameter in (old, old):
            parameter.grad = torch.ones(16)
            optimizer.step()
        new = nn.Parameter(old.detach() * 2)
        optimizer.state[new] = optimizer.state.pop(old)
        optimizer.param_groups[0]["params"][0] = new
        new.grad = torch.ones(16)
        optimizer.step()
        results.append((new, optimizer.state[new]["exp_avg"], optimizer.state[new]["step"]))
        assert len(optimizer.state_dict()["state"]) == 1
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_the_last_parameter_is_replaced_again_and_again() -> None:
    results = []
    for kind in (torch.optim.SGD, longshore.SGD):
        parameters = [nn.Parameter(torch.zeros(257)) for _ in range(2)]
        optimizer: Any = kind(parameters, lr=0.1)
        for step in range(6):
            if step < 3:
                optimizer.state.pop(parameters[1], None)
                parameters[1] = nn.Parameter(parameters[1].detach().clone())
                optimizer.param_groups[0]["params"][1] = parameters[1]
            for parameter in parameters:
                parameter.grad = torch.ones(257)
            optimizer.step()
        results.append(torch.cat([parameter.detach() for parameter in parameters]))
    assert torch.equal(*results)


def test_a_parameter_put_into_a_group_whose_names_are_fewer() -> None:
    results = []
    for kind in (torch.optim.SGD, longshore.SGD):
        parameters = [nn.Parameter(torch.zeros(16)) for _ in range(3)]
        optimizer: Any = kind([("first", parameters[0])], lr=0.1)
        for step in range(3):
            optimizer.param_groups[0]["params"][1:] = parameters[1 : step + 1]
            for parameter in parameters:
                parameter.grad = torch.ones(16)
            optimizer.step()
        results.append(torch.stack([parameter.detach() for parameter in parameters]))
    assert torch.equal(*results)


@pytest.mark.parametrize("release", [False, True])
def test_a_parameter_that_is_cut_in_place_is_named(release: bool) -> None:
    """``p.data = p.data[keep]`` after a step: torch's state is cut as well, ours is told how."""
    parameter = nn.Parameter(torch.ones(8, 4))
    optimizer = longshore.AdamW([("weight", parameter)], release_gradients=release)
    parameter.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    parameter.data = parameter.data[:5]
    message = r"weight was torch.float32 \[8, 4\].* \[5, 4\].*state\[new\] = state.pop\(old\)"
    for use in (lambda: optimizer.state[parameter]["exp_avg"], optimizer.state_dict):
        with pytest.raises(longshore.ParameterError, match=message):
            use()
    if not release:
        parameter.grad = torch.ones(5, 4)
        with pytest.raises(longshore.ParameterError, match=message):
            optimizer.step()

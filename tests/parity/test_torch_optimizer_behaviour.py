"""What scripts do with any ``torch.optim.Optimizer``, done to torch's and to ours: what they see is the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import longshore

Make = Callable[..., Any]


def torchs(params: Any, **options: Any) -> Any:
    return torch.optim.AdamW(params, **options)


def ours(params: Any, **options: Any) -> Any:
    return longshore.AdamW(params, **options, offload=longshore.Offload(threads=1))


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.full(shape, 0.5)) for shape in ((16,), (4, 4))]


def with_gradients() -> list[nn.Parameter]:
    params = parameters()
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    return params


def raised_by(call: Callable[[], Any]) -> type | None:
    try:
        call()
    except Exception as error:
        return type(error)
    return None


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    return [
        {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")} | {"numel": [*map(len, group["params"])]}
        for group in optimizer.param_groups
    ]


def hooks_of_a_step(make: Make) -> Any:
    """Hooks of all optimizers come first, and a hook may replace the arguments."""
    optimizer, seen = make(with_gradients()), []

    def noting(name: str) -> Any:
        return lambda it, arguments, named: seen.append((name, it is optimizer, len(arguments), {*named}))

    def replace(it: Any, arguments: Any, named: Any) -> Any:
        return arguments, {"closure": lambda: 3.0}

    handles = [
        torch_optimizer.register_optimizer_step_post_hook(noting("post of all")),
        optimizer.register_step_post_hook(noting("post")),
        torch_optimizer.register_optimizer_step_pre_hook(noting("pre of all")),
        optimizer.register_step_pre_hook(noting("pre")),
        optimizer.register_step_pre_hook(replace),
    ]
    try:
        result = optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    optimizer.step()
    return result, seen


def hooks_that_return_nonsense(make: Make) -> Any:
    optimizer = make(with_gradients())
    optimizer.register_step_pre_hook(lambda *_: 7)
    return raised_by(optimizer.step)


def hooks_of_state_dict(make: Make) -> Any:
    optimizer, seen = make(with_gradients()), []

    def note(name: str) -> Any:
        return lambda it, *found: seen.append((name, it is optimizer, [sorted(map(str, each)) for each in found]))

    optimizer.register_state_dict_pre_hook(note("pre"))
    optimizer.register_state_dict_post_hook(lambda it, state: {**state, "extra": 1})
    optimizer.register_state_dict_post_hook(lambda it, state: seen.append("extra" in state), prepend=True)
    optimizer.register_load_state_dict_pre_hook(lambda it, state: {**state, "param_groups": changed(state)})
    optimizer.register_load_state_dict_post_hook(note("loaded"))

    def changed(state: Any) -> Any:
        return [{**group, "lr": 0.25} for group in state["param_groups"]]

    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    return seen, saved["extra"], options_of(optimizer)


def kinds_of_groups(make: Make) -> Any:
    one, two = parameters()
    given: list[Any] = [
        (each for each in (one, two)),
        {"a": one, "b": two}.values(),
        [{"params": one, "lr": 0.1}, {"params": [two]}],
        [("a", one), ("b", two)],
        [{"params": [("a", one)]}, {"params": [("b", two)], "eps": 1e-3}],
        ({"params": each} for each in (one, two)),
    ]
    return [(options_of(make(each, lr=0.5)), [g.get("param_names") for g in make_again(make, each)]) for each in given]


def make_again(make: Make, given: Any) -> Any:
    """Dictionaries have their names already."""
    found = [*given]
    return make(found).param_groups if found else []


def errors_of_groups(make: Make) -> Any:
    one, two = parameters()
    optimizer = make([one])
    return [
        raised_by(lambda: make([])),
        raised_by(lambda: make(one)),
        raised_by(lambda: make([{"params": [one]}, {"params": [one]}])),
        raised_by(lambda: make([{"params": {one, two}}])),
        raised_by(lambda: make(["a"])),
        raised_by(lambda: make([one * 2])),
        raised_by(lambda: make([one, ("b", two)])),
        raised_by(lambda: optimizer.add_param_group([two])),
        raised_by(lambda: optimizer.add_param_group({"params": [one]})),
        raised_by(lambda: optimizer.add_param_group({"params": {two}})),
        raised_by(lambda: optimizer.add_param_group({"params": [two * 2]})),
        raised_by(lambda: optimizer.add_param_group({"params": [("b", two)]})),
        raised_by(lambda: optimizer.add_param_group({"params": two, "lr": 0.3})),
        options_of(optimizer),
    ]


def defaults_and_text(make: Make) -> Any:
    optimizer = make([{"params": parameters(), "lr": 0.5}], lr=0.1, betas=(0.8, 0.9))
    known = {key: optimizer.defaults[key] for key in ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")}
    lines = [line.strip() for line in repr(optimizer).splitlines()]
    return known, lines[:2], [line for line in lines if line.startswith(("lr", "betas", "eps"))]


def a_closure(make: Make) -> Any:
    params, seen = parameters(), []
    optimizer = make(params, lr=0.1)

    def closure() -> Any:
        seen.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = sum((parameter**2).sum() for parameter in params)
        loss.backward()
        return loss.detach()

    with torch.no_grad():
        loss = optimizer.step(closure)
        seen.append(torch.is_grad_enabled())
    return seen, loss.tolist(), [parameter.tolist() for parameter in params]


def zeroed(make: Make) -> Any:
    params = with_gradients()
    optimizer = make(params)
    kept = params[0].grad
    optimizer.zero_grad(set_to_none=False)
    same = params[0].grad is kept, params[0].grad.tolist()
    optimizer.zero_grad()
    return same, [parameter.grad for parameter in params]


def a_tensor_as_lr(make: Make) -> Any:
    params, lr = with_gradients(), torch.tensor(0.125)
    optimizer = make(params, lr=lr, fused=True) if make is torchs else make(params, lr=lr)
    optimizer.step()
    lr.fill_(0.25)
    optimizer.step()
    return optimizer.param_groups[0]["lr"] is lr, [parameter.tolist() for parameter in params]


def refused_values(make: Make) -> Any:
    wrong = [{"lr": -1.0}, {"eps": -1.0}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"weight_decay": -1.0}]
    return [raised_by(lambda options=options: make(parameters(), **options)) for options in wrong]


def a_copy(make: Make) -> Any:
    """The copy steps its own parameters."""
    params = with_gradients()
    optimizer = make(params, lr=0.1)
    optimizer.step()
    try:
        again, theirs = copy.deepcopy((optimizer, params))
    except TypeError:
        return "refused"
    for parameter in theirs:
        parameter.grad = torch.ones_like(parameter)
    again.step()
    return [parameter.tolist() for parameter in (*params, *theirs)]


def profiled(make: Make) -> Any:
    optimizer = make(with_gradients())
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:  # without, torch 2.12 warns
        optimizer.step()
        optimizer.zero_grad()
    return sorted(event.key for event in profile.key_averages() if event.key.startswith("Optimizer."))


PROGRAMS = [
    hooks_of_a_step, hooks_that_return_nonsense, hooks_of_state_dict, kinds_of_groups, errors_of_groups,
    defaults_and_text, a_closure, zeroed, a_tensor_as_lr, refused_values, a_copy, profiled,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_as_torchs(program: Callable[[Make], Any]) -> None:
    assert program(ours) == program(torchs)


def test_what_differs_from_torchs() -> None:
    """A parameter that would be stepped twice is refused."""
    one, _ = parameters()
    with pytest.warns(UserWarning, match="duplicate parameters"):
        torchs([one, one])
    with pytest.raises(ValueError, match="stepped twice"):
        ours([one, one])

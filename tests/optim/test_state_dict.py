"""``state``, ``state_dict``, schedulers: the face of ``torch.optim.Optimizer``, both ways."""

from __future__ import annotations

import copy
import signal
import threading
from functools import partial
from typing import Any

import pytest
import torch
from support import (
    KIND_NAMES,
    KINDS,
    Kind,
    PlainLoop,
    loss_of,
    model_of_sixteens,
    same_weights,
    simulated,
    small_model,
    twins,
)
from torch import nn
from torch.optim import lr_scheduler

import longshore
from longshore.engine.optimizers import from_client
from longshore.errors import BrokenStateError
from longshore.optim.state import write_state


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, dtype: torch.dtype = torch.float32) -> None:
    for step in steps:
        loss_of(model, step, dtype).backward()
        optimizer.step()
        optimizer.zero_grad()


EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES)
TORCHS = pytest.mark.parametrize(
    "kind",
    [kind for kind in KINDS if kind.name != "Lion"],
    ids=[name for name in KIND_NAMES if name != "Lion"],
)


@pytest.mark.quick(0)
@TORCHS
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_from_torch(kind: Kind, options: dict[str, Any]) -> None:
    plain_model, model = model_of_sixteens(), model_of_sixteens()
    theirs = kind.plain()(plain_model.parameters(), **kind.options, **options)
    train(plain_model, theirs, range(3))
    model.load_state_dict(plain_model.state_dict())
    ours = kind.make(model.parameters(), lr=9.0, offload=simulated())
    ours.load_state_dict(theirs.state_dict())
    fused = kind.plain()(plain_model.parameters(), fused=True)  # pyright: ignore[reportCallIssue]
    saved = theirs.state_dict()
    for group in saved["param_groups"]:
        group.update(fused=True, foreach=None)
    fused.load_state_dict(saved)
    train(plain_model, fused, range(3, 6))
    train(model, ours, range(3, 6))
    assert same_weights(plain_model, model)
    assert ours.param_groups[0]["lr"] == kind.options["lr"]
    assert ours.param_groups[0].keys() >= theirs.param_groups[0].keys()


@pytest.mark.quick(0)
@TORCHS
@pytest.mark.parametrize("fused", [{}, {"fused": None}, {"fused": True}], ids=["unset", "none", "true"])
def test_to_torch(kind: Kind, fused: dict[str, Any]) -> None:
    """Back to torch's optimizer as it is built by default, with the bits of never having left longshore."""
    plain_model, model = model_of_sixteens(), model_of_sixteens()
    first, *others = model.parameters()
    ours = kind.make([{"params": [first], **fused}, {"params": others}], **fused, offload=simulated())
    assert all(group["fused"] is True for group in ours.state_dict()["param_groups"])
    train(model, ours, range(3))
    plain_model.load_state_dict(model.state_dict())
    first, *others = plain_model.parameters()
    theirs = kind.plain()([{"params": [first]}, {"params": others}])
    assert not any(group["fused"] for group in theirs.param_groups)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))  # as between two of torch's, which would share tensors
    train(plain_model, theirs, range(3, 6))
    train(model, ours, range(3, 6))
    assert same_weights(plain_model, model)
    for ours_one, theirs_one in zip(model.parameters(), plain_model.parameters(), strict=True):
        state = theirs.state.get(theirs_one, {})
        assert {*state} - {"step"} == {*kind.states}
        assert len(ours.state.get(ours_one, {})) == len(state)
        for key, value in state.items():
            assert torch.equal(ours.state[ours_one][key], value)


@pytest.mark.quick(0)
@pytest.mark.covering(1)
@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@EVERY_KIND
def test_resumed_equals_uninterrupted(dtype: torch.dtype, release: bool, kind: Kind) -> None:
    whole_model, model = twins(dtype)
    options: dict[str, Any] = {"release_gradients": release}
    whole = kind.make(whole_model.named_parameters(), **options)
    train(whole_model, whole, range(6), dtype)

    first = kind.make(model.named_parameters(), **options, offload=simulated(tile_numel=37))
    train(model, first, range(3), dtype)
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": first.state_dict()})
    first.close()
    resumed_model = small_model(dtype, seed=5)
    resumed = kind.make(resumed_model.named_parameters(), **options, offload=simulated(tile_numel=211))
    resumed.load_state_dict(saved["optimizer"])  # before the model's weights, on purpose
    resumed_model.load_state_dict(saved["model"])
    train(resumed_model, resumed, range(3, 6), dtype)
    assert same_weights(whole_model, resumed_model)
    for parameter, other in zip(whole_model.parameters(), resumed_model.parameters(), strict=True):
        for key, value in whole.state.get(parameter, {}).items():
            assert torch.equal(value, resumed.state[other][key]), key
            assert value.dtype == torch.float32
    found = whole.state.get(next(iter(whole_model.parameters())), {})
    step = {"step"} if kind.name != "SGD" else set()
    assert found.keys() == {*kind.states, *step, *(() if dtype == torch.float32 else ("master",))}


def test_state_survives_torch_save(tmp_path: Any) -> None:
    model = small_model(torch.bfloat16)
    optimizer = longshore.AdamW(model.parameters())
    assert optimizer.state_dict()["state"] == {}
    train(model, optimizer, range(2), torch.bfloat16)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    loaded = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert loaded["state"].keys() == set(range(6))
    other = longshore.AdamW(model.parameters())
    other.load_state_dict(loaded)
    assert torch.equal(other.state[model[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


def test_low_precision_state_from_torch_without_masters() -> None:
    """The parameter is the master; moments are taken in float32 as they are."""
    plain_model, model = twins(torch.bfloat16)
    theirs = torch.optim.AdamW(plain_model.parameters(), lr=1e-2)
    train(plain_model, theirs, range(2), torch.bfloat16)
    model.load_state_dict(plain_model.state_dict())
    ours = longshore.AdamW(model.parameters())
    ours.load_state_dict(theirs.state_dict())
    plain = PlainLoop(plain_model.parameters(), lr=0.0)
    plain.step([torch.zeros_like(parameter) for parameter in plain.parameters])  # makes torch's state
    plain.optimizer.param_groups[0]["lr"] = 1e-2
    for parameter, master in zip(plain.parameters, plain.masters, strict=True):
        state, moments = plain.optimizer.state[master], theirs.state[parameter]
        state["step"].fill_(2.0)
        for key in ("exp_avg", "exp_avg_sq"):
            state[key][: parameter.numel()] = moments[key].float().view(-1)
    for step in range(2, 5):
        loss_of(plain_model, step, torch.bfloat16).backward()
        plain.step_on_grads()
        train(model, ours, range(step, step + 1), torch.bfloat16)
        assert same_weights(plain_model, model)


def test_state_is_looked_up_at_each_access_and_written_through() -> None:
    plain_model, model = twins()
    plain = PlainLoop(plain_model.parameters(), lr=1e-2)
    optimizer = longshore.AdamW(model.parameters(), lr=1e-2, offload=simulated(tile_numel=50))
    assert len(optimizer.state) == 0 and model[0].weight not in optimizer.state
    state = optimizer.state[model[0].weight]
    assert dict(state) == {}
    for step in range(3):
        for each in (plain_model, model):
            loss_of(each, step).backward()
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        first, second = plain.moments(0)
        assert state["step"] == step + 1
        assert torch.equal(state["exp_avg"], first) and torch.equal(state["exp_avg_sq"], second)
    state["exp_avg"] = torch.zeros(33, 19)
    plain.optimizer.state[plain.masters[0]]["exp_avg"].zero_()
    for each in (plain_model, model):
        loss_of(each, 9).backward()
    plain.step_on_grads()
    optimizer.step()
    assert same_weights(plain_model, model)
    with pytest.raises(ValueError, match="unknown state 'momentum_buffer'"):
        state["momentum_buffer"] = torch.zeros(33, 19)
    before, state["exp_avg"] = state["exp_avg"], torch.zeros(3)
    with pytest.raises(ValueError, match=r"exp_avg is .*\[3\]"):
        optimizer.state_dict()
    state["exp_avg"] = before
    with pytest.raises(TypeError, match="cannot be deleted"):
        del state["exp_avg"]
    with pytest.raises(KeyError):
        optimizer.state[torch.zeros(1)]


def test_deleting_or_replacing_state_starts_a_parameter_anew() -> None:
    model = small_model()
    optimizer = longshore.AdamW(model.parameters())
    train(model, optimizer, range(3))
    kept = {parameter: dict(optimizer.state[parameter]) for parameter in model.parameters()}
    del optimizer.state[model[0].weight]
    assert model[0].weight not in optimizer.state and len(optimizer.state) == 5
    optimizer.state = {}
    assert len(optimizer.state) == 0
    optimizer.state = kept
    assert optimizer.state[model[0].weight]["step"] == 3
    for key, value in kept[model[0].weight].items():
        assert torch.equal(optimizer.state[model[0].weight][key], value)


@pytest.mark.parametrize(
    ("saving", "options", "loading", "message"),
    [
        ("SGD", {"momentum": 0.9}, "AdamW", "has no betas: .*momentum, dampening"),
        ("SGD", {}, "Lion", "group 0 of the state has no betas: it is another optimizer's"),
        ("Adagrad", {}, "Adam", "has no betas: .*lr_decay"),
        ("Adafactor", {}, "AdamW", "has no betas: .*beta2_decay"),
        ("Adam", {}, "SGD", "has no momentum: .*betas"),
        ("Adam", {}, "Lion", "unknown state 'exp_avg_sq'; longshore keeps step, exp_avg, master for this optimizer, "
         "and step, exp_avg, exp_avg_sq is another's"),
        ("Adamax", {}, "Adam", "unknown state 'exp_inf'; longshore keeps step, exp_avg, exp_avg_sq, master"),
        ("Adam", {}, "Adagrad", "unknown state 'exp_avg'; longshore keeps step, sum, master"),
    ],
)  # fmt: skip
def test_a_state_of_another_optimizer_says_what_it_has(
    saving: str, options: dict[str, Any], loading: str, message: str
) -> None:
    model, other = small_model(), small_model()
    saved = getattr(torch.optim, saving)(other.parameters(), lr=1e-2, **options)
    train(other, saved, range(1))
    optimizer = getattr(longshore, loading)(model.parameters(), lr=1e-2)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=f"{message}.*load it with the class that saved it, or begin anew"):
        optimizer.load_state_dict(saved.state_dict())
    assert optimizer.state_dict() == before


@pytest.mark.parametrize(
    ("saved", "loading", "message"),
    [
        ([6], [2, 4], r"groups of \[6\] parameters, and this optimizer of \[2, 4\]: they differ from group 0 on"),
        ([2, 4], [2, 3], r"groups of \[2, 4\] parameters, and this optimizer of \[2, 3\]: they differ from group 1 on"),
        ([2, 4], [2, 4, 0], "they differ from group 2 on"),
    ],
)
def test_groups_that_do_not_fit_are_told_apart(saved: list[int], loading: list[int], message: str) -> None:
    def grouped(numel: list[int]) -> longshore.AdamW:
        parameters = iter(list(small_model().parameters()))
        return longshore.AdamW([{"params": [next(parameters) for _ in range(n)]} for n in numel])

    with pytest.raises(ValueError, match=f"{message}; build the optimizer with the groups"):
        grouped(loading).load_state_dict(grouped(saved).state_dict())


@pytest.mark.parametrize("edit", ["shape", "groups", "amsgrad", "unknown", "names", "stranger", "option", "step"])
def test_a_state_that_does_not_fit_changes_nothing(edit: str) -> None:
    model = small_model()
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    bad = copy.deepcopy(saved)
    bad["param_groups"][0]["lr"] = 7.0
    first = bad["state"][0]
    if edit == "shape":
        first["exp_avg"] = torch.zeros(4)
    elif edit == "groups":
        bad["param_groups"][0]["params"].pop()
    elif edit == "amsgrad":
        first["max_exp_avg_sq"] = torch.zeros(33, 19)
    elif edit == "unknown":
        first["momentum_buffer"] = torch.zeros(33, 19)
    elif edit == "names":
        bad["param_groups"][0]["param_names"][2] = "other"
    elif edit == "stranger":
        bad["state"][77] = first
    elif edit == "option":
        bad["param_groups"][0]["amsgrad"] = True
    else:
        first["step"] = 2.5
    with pytest.raises(ValueError, match=r"0\.weight|parameters|amsgrad|other|no parameter"):
        optimizer.load_state_dict(bad)
    now = optimizer.state_dict()
    assert now["param_groups"] == saved["param_groups"]
    for index, state in saved["state"].items():
        assert all(torch.equal(state[key], now["state"][index][key]) for key in state)


_WRAPPED = ["{}", "module.{}", "_orig_mod.{}", "_orig_mod.module.{}", "module._orig_mod.{}"]


@pytest.mark.parametrize("loading", _WRAPPED)
@pytest.mark.parametrize("saved", _WRAPPED)
def test_names_of_wrapped_models_are_the_same(saved: str, loading: str) -> None:
    optimizers = []
    for wrapper in (saved, loading):
        model = small_model()
        names = [(wrapper.format(name), parameter) for name, parameter in model.named_parameters()]
        optimizers.append(longshore.AdamW(names, lr=1e-2, offload=longshore.Offload(threads=1)))
        if len(optimizers) == 1:
            train(model, optimizers[0], range(1))
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    one, other = (optimizer.state_dict()["state"] for optimizer in optimizers)
    for index, state in one.items():
        assert all(torch.equal(state[key], other[index][key]) for key in state)


@pytest.mark.parametrize(
    ("saved", "loading"),
    [(("module.a", "a"), ("a", "module.a")), (("module.b", "module.a"), ("a", "b")), (("module.a", "b"), ("b", "a"))],
)
def test_names_that_only_a_wrapper_tells_apart_stay_different(saved: Any, loading: Any) -> None:
    one, other = (
        longshore.AdamW([(name, torch.nn.Parameter(torch.zeros(2))) for name in names]) for names in (saved, loading)
    )
    with pytest.raises(ValueError, match="in the same order"):
        other.load_state_dict(one.state_dict())


def test_hooks_of_state_dict_and_load_state_dict() -> None:
    model = small_model()
    optimizer = longshore.AdamW(model.parameters())
    train(model, optimizer, range(2))
    seen: list[Any] = []
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(len(state["state"])))
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append(float(opt.state[model[0].weight]["step"])))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    saved = optimizer.state_dict()
    assert saved["extra"] == 1
    saved["state"][0]["step"] = torch.tensor(41.0)
    optimizer.load_state_dict(saved)
    assert seen == [6, 41.0]


@pytest.mark.parametrize("release", [False, True])
def test_loading_keeps_the_window_as_torch_does(release: bool) -> None:
    plain_model, model = twins()
    plain = PlainLoop(plain_model.parameters(), lr=1e-2)
    optimizer = longshore.AdamW(model.parameters(), lr=1e-2, release_gradients=release, offload=simulated())
    for step in range(3):
        for each in (plain_model, model):
            loss_of(each, step).backward()
        optimizer.load_state_dict(optimizer.state_dict())
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(plain_model, model)


# -- groups and schedulers ----------------------------------------------------


@pytest.mark.parametrize("release", [False, True])
def test_add_param_group_in_mid_training(release: bool) -> None:
    plain_model, model = model_of_sixteens(), model_of_sixteens()
    theirs = torch.optim.AdamW(plain_model[0].parameters(), lr=1e-2, fused=True)
    ours = longshore.AdamW(model[0].parameters(), lr=1e-2, release_gradients=release, offload=simulated())
    for step in range(4):
        if step == 2:
            theirs.add_param_group({"params": plain_model[3].parameters(), "lr": 3e-2})
            ours.add_param_group({"params": model[3].parameters(), "lr": 3e-2})
        for each, optimizer in ((plain_model, theirs), (model, ours)):
            each.zero_grad()
            loss_of(each, step).backward()
            optimizer.step()
    assert same_weights(plain_model, model)
    assert not torch.equal(model[3].weight, model_of_sixteens()[3].weight)
    saved = ours.param_groups
    with pytest.raises(ValueError, match="amsgrad"):
        ours.add_param_group({"params": [nn.Parameter(torch.ones(2))], "amsgrad": True})
    with pytest.raises(ValueError, match="more than one parameter group"):
        ours.add_param_group({"params": model[3].parameters()})
    assert len(saved) == 2
    train(model, ours, range(4, 5))


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.95),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=10),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("tensor", [False, True])
def test_every_scheduler(name: str, tensor: bool) -> None:
    plain_model, model = model_of_sixteens(), model_of_sixteens()
    rates = [torch.tensor(1e-2) if tensor else 1e-2 for _ in range(2)]
    theirs = torch.optim.AdamW(plain_model.parameters(), lr=rates[0], fused=True)
    ours = longshore.AdamW(model.parameters(), lr=rates[1])
    schedulers = [SCHEDULERS[name](theirs), SCHEDULERS[name](ours)]
    seen = set()
    for step in range(5):
        for each, optimizer, scheduler in zip((plain_model, model), (theirs, ours), schedulers, strict=True):
            loss_of(each, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        seen.add(float(ours.param_groups[0]["lr"]))
        assert same_weights(plain_model, model)
    assert len(seen) > 1


def test_every_scheduler_of_torch_is_tested() -> None:
    public = {
        name
        for name, kind in vars(lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert public - {"LRScheduler"} == set(SCHEDULERS)


@pytest.mark.filterwarnings("ignore:torch.optim.NAdam has no kernel")
@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "Adagrad", "NAdam"])
def test_switches_that_an_older_state_lacks_are_off(kind: str) -> None:
    """As torch's: a state of a torch that had no ``maximize`` descends."""
    options: dict[str, Any] = {"lr": 0.1, "maximize": True}
    options |= {"nesterov": True, "momentum": 0.9} if kind == "SGD" else {}
    options |= {"decoupled_weight_decay": True} if kind in ("Adam", "NAdam") else {}
    parameters = [nn.Parameter(torch.ones(64)) for _ in range(2)]
    theirs = getattr(torch.optim, kind)([parameters[0]], **options)
    make = getattr(longshore, kind, None)
    client = None if make else getattr(torch.optim, kind)([parameters[1]], **options)
    ours = make([parameters[1]], **options) if make else from_client(client, release_gradients=False)
    for each in (theirs, ours):
        saved = each.state_dict()
        for name in ("maximize", "nesterov", "decoupled_weight_decay"):
            saved["param_groups"][0].pop(name, None)
        each.load_state_dict(saved)
    switches = [name for name in ("maximize", "nesterov", "decoupled_weight_decay") if name in theirs.param_groups[0]]
    for name in switches:
        assert ours.param_groups[0][name] == theirs.param_groups[0][name], name


@pytest.mark.parametrize("release", [False, True])
def test_loading_that_is_interrupted_is_seen(release: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = model_of_sixteens(), model_of_sixteens()
    saving = longshore.AdamW(model.parameters(), release_gradients=release)
    train(model, saving, range(3))
    saved = saving.state_dict()
    optimizer = longshore.AdamW(other.parameters(), release_gradients=release)
    train(other, optimizer, range(1))
    calls: list[None] = []

    def interrupted(*arguments: Any) -> None:
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        write_state(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("longshore.optim.state.write_state", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.load_state_dict(saved)
    loss_of(other, 1).backward()
    for call in (optimizer.step, optimizer.state_dict):
        with pytest.raises(BrokenStateError, match=r"in part only .load_state_dict ended half way: KeyboardInt"):
            call()
    other.load_state_dict(model.state_dict())
    optimizer.load_state_dict(saved)
    for each, stepped in ((model, saving), (other, optimizer)):
        stepped.zero_grad()
        train(each, stepped, range(3, 5))
    assert same_weights(model, other)


def test_ctrl_c_at_any_write_waits_until_the_state_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = model_of_sixteens(), model_of_sixteens()
    saving = longshore.AdamW(model.parameters())
    train(model, saving, range(3))
    saved = saving.state_dict()
    optimizer = longshore.AdamW(other.parameters())
    train(other, optimizer, range(1))
    store, calls = optimizer._core.members.store.states, iter(range(10**6))
    writes = {name: getattr(store, name) for name in ("write", "clear")}

    def interrupting(at: int, times: int, name: str) -> Any:
        def write(*arguments: Any) -> None:
            place = next(calls)
            for _ in range(times if place == at else 0):
                signal.raise_signal(signal.SIGINT)
            writes[name](*arguments)

        return write

    def load(at: int, times: int = 1) -> None:
        nonlocal calls
        calls = iter(range(10**6))
        with monkeypatch.context() as patch:
            for name in writes:
                patch.setattr(store, name, interrupting(at, times, name))
            optimizer.load_state_dict(saved)

    load(-1)
    numel = next(calls)
    assert numel >= 3 * len(list(other.parameters()))
    for at in range(numel):
        optimizer.load_state_dict({**saved, "state": {}})
        with pytest.raises(KeyboardInterrupt):
            load(at)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        found = optimizer.state_dict()["state"]
        for key, state in saved["state"].items():
            assert all(torch.equal(found[key][name], value) for name, value in state.items())
    with pytest.raises(KeyboardInterrupt):
        load(2, times=2)
    with pytest.raises(BrokenStateError, match="load_state_dict ended half way: KeyboardInterrupt"):
        optimizer.state_dict()
    thread = threading.Thread(target=optimizer.load_state_dict, args=(saved,))
    thread.start()
    thread.join()
    other.load_state_dict(model.state_dict())
    for each, stepped in ((model, saving), (other, optimizer)):
        train(each, stepped, range(3, 5))
    assert same_weights(model, other)


@pytest.mark.parametrize("fused", [True, False])
def test_states_have_the_memory_order_of_their_parameters(fused: bool) -> None:
    """torch's fused kernels take a parameter and its states as they lie in memory: a longshore state of a transposed or
    channels-last parameter, loaded into torch, trains the same weights as one that torch made."""

    def parameters() -> list[nn.Parameter]:
        torch.manual_seed(0)
        conv = torch.randn(8, 4, 4, 4).to(memory_format=torch.channels_last)
        return [nn.Parameter(conv), nn.Parameter(torch.randn(16, 32).t())]

    def step(optimizer: Any, members: list[nn.Parameter]) -> None:
        for each in members:
            each.grad = each.detach() * 0.1
            assert each.grad.stride() == each.stride()
        optimizer.step()

    ours, plain = parameters(), parameters()
    first, theirs = longshore.AdamW(ours, lr=1e-2), torch.optim.AdamW(plain, lr=1e-2, fused=True)
    for _ in range(2):
        step(first, ours)
        step(theirs, plain)
    for each in ours:
        assert first.state[each]["exp_avg"].stride() == each.stride()
    second = torch.optim.AdamW(ours, lr=1e-2, **({"fused": True} if fused else {}))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for _ in range(2):
        step(second, ours)
        step(theirs, plain)
    assert all(map(torch.equal, ours, plain))
    first.state[ours[0]]["exp_avg"].zero_()  # edits are seen in whatever order
    assert not first.state[ours[0]]["exp_avg"].any()
    step(first, ours)
    assert torch.allclose(first.state[ours[0]]["exp_avg"], ours[0].grad * 0.1)


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_change_of_memory_format_keeps_each_elements_moments(dtype: torch.dtype, release: bool) -> None:
    """torch's fused kernel mispairs moments after it; the weights are those of torch where the format stays."""

    def trained(make: Any, changed: bool) -> torch.Tensor:
        torch.manual_seed(0)
        conv = nn.Conv2d(4, 8, 4, bias=False).to(dtype)
        optimizer = make(conv.parameters())
        for step in range(4):
            if changed and step == 2:
                conv.to(memory_format=torch.channels_last)
                assert conv.weight.is_contiguous(memory_format=torch.channels_last)
            factor = torch.randn(conv.weight.shape, generator=torch.Generator().manual_seed(step)).to(dtype)
            (conv.weight * factor).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return conv.weight.detach().contiguous()

    def ours(parameters: Any) -> Any:
        return longshore.AdamW(parameters, lr=1e-2, release_gradients=release)

    kept = trained(ours, False)
    assert torch.equal(trained(ours, True), kept)
    if dtype == torch.float32:
        theirs = partial(torch.optim.AdamW, lr=1e-2, fused=True)
        assert torch.equal(trained(theirs, False), kept)
        assert not torch.allclose(trained(theirs, True), kept, atol=1e-3)


@pytest.mark.parametrize("released", [False, True])
def test_states_are_in_the_order_in_which_parameters_were_first_stepped(released: bool) -> None:
    """Also where nobody looked at the state in between: a loop over it may end with an error half way."""
    orders = []
    for kind, options in ((torch.optim.AdamW, {}), (longshore.AdamW, {"release_gradients": released})):
        parameters = [nn.Parameter(torch.ones(3)) for _ in range(4)]
        optimizer = kind(parameters, **options)
        for used in ([3, 1], [0, 1], [2, 3]):
            sum(parameters[index].sum() for index in used).backward()  # pyright: ignore[reportAttributeAccessIssue]
            optimizer.step()
            optimizer.zero_grad()
        index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        orders.append([index_of[id(parameter)] for parameter in optimizer.state])
    assert orders == [[1, 3, 0, 2]] * 2

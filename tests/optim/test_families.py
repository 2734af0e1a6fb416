"""What each rule family adds: its arrays and their memory, its options, its refusals."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import pytest
import torch
from support import KIND_NAMES, KINDS, Kind, PlainLoop, loss_of, same_weights, simulated, small_model, twins
from torch import nn

import longshore

EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@EVERY_KIND
def test_the_signature_is_torchs(kind: Kind) -> None:
    if kind.name == "Lion":
        pytest.skip("torch has no Lion")
    own = inspect.signature(getattr(longshore, kind.name)).parameters
    torchs = inspect.signature(kind.plain()).parameters
    added = {"release_gradients", "offload", "bias_correction"}
    assert [name for name in own if name not in added] == list(torchs)
    for name, parameter in torchs.items():
        assert (own[name].default, own[name].kind) == (parameter.default, parameter.kind), name


@EVERY_KIND
def test_the_host_holds_the_master_and_the_rules_states(kind: Kind) -> None:
    model = small_model(torch.bfloat16)
    optimizer = kind.make(model.parameters())
    loss_of(model, 0, torch.bfloat16).backward()
    optimizer.step()
    numel = sum(tile.layout.buffer_numel for tile in optimizer._core.members.store.tiles)
    assert optimizer.host_bytes()["state"] == 4 * (1 + len(kind.states)) * numel


@EVERY_KIND
@pytest.mark.parametrize("release", [False, True])
def test_idle_parameters_keep_everything(kind: Kind, release: bool) -> None:
    """And begin later than the others, which for SGD means that their buffer does."""
    plain_model, model = twins()
    plain = kind.loop(plain_model.parameters())
    optimizer = kind.make(model.parameters(), release_gradients=release, offload=simulated(tile_numel=1 << 20))
    for step, idle in enumerate([(4, 5), (0, 1, 4, 5), (2,), ()]):
        for each in (plain_model, model):
            for index, parameter in enumerate(each.parameters()):
                parameter.requires_grad_(index not in idle)
            loss_of(each, step).backward()
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(plain_model, model), step
    for index, parameter in enumerate(model.parameters()):
        for name in kind.states:
            assert torch.equal(optimizer.state[parameter][name], plain.state(index, name))


@EVERY_KIND
def test_setting_and_deleting_states(kind: Kind) -> None:
    plain_model, model = twins()
    plain = kind.loop(plain_model.parameters())
    optimizer = kind.make(model.parameters(), offload=simulated())
    for step in range(4):
        for each in (plain_model, model):
            loss_of(each, step).backward()
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        for name in kind.states:
            optimizer.state[model[0].weight][name] = torch.full((33, 19), 0.5)
            plain.optimizer.state[plain.masters[0]][name].fill_(0.5)
    assert same_weights(plain_model, model)
    with contextlib.nullcontext() if kind.states else pytest.raises(KeyError):  # as in torch
        del optimizer.state[model[0].weight]
    assert model[0].weight not in optimizer.state
    assert len(optimizer.state) == (5 if kind.states else 0)


def test_momentum_may_come_and_go() -> None:
    """Buffers grow when the first group gets momentum; a buffer stays while there is none."""
    plain_model, model = twins()
    plain = PlainLoop(plain_model.parameters(), torch.optim.SGD, lr=1e-3)
    optimizer = longshore.SGD(model.parameters(), lr=1e-3, offload=simulated(tile_numel=100))
    momenta = [0.0, 0.9, 0.9, 0.0, 0.5]
    buffers = []
    for step, momentum in enumerate(momenta):
        plain.optimizer.param_groups[0]["momentum"] = optimizer.param_groups[0]["momentum"] = momentum
        for each in (plain_model, model):
            loss_of(each, step).backward()
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(plain_model, model), step
        buffers.append(optimizer.host_bytes()["state"])
    assert buffers[1:] == [2 * buffers[0]] * 4


def test_groups_with_and_without_momentum_share_a_tile() -> None:
    plain_model, model = twins()

    def groups(of: nn.Sequential) -> list[dict[str, Any]]:
        return [
            {"params": list(of[0].parameters()), "momentum": 0.9, "dampening": 0.3},
            {"params": list(of[2].parameters()), "weight_decay": 0.1, "lr": torch.tensor(2e-3)},
            {"params": list(of[3].parameters()), "momentum": 0.5, "nesterov": True, "maximize": True},
        ]

    plain = PlainLoop(groups(plain_model), torch.optim.SGD, lr=1e-3)
    optimizer = longshore.SGD(groups(model), lr=1e-3, offload=simulated(tile_numel=1 << 20))
    for step in range(5):
        for each in (plain_model, model):
            loss_of(each, step).backward()
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(plain_model, model), step
    assert len(optimizer._core.members.store.tiles) == 1  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    assert [list(optimizer.state.get(p, {})) for p in model.parameters()] == [["momentum_buffer"]] * 2 + [[]] * 2 + [
        ["momentum_buffer"]
    ] * 2


def test_a_loaded_buffer_makes_buffers_grow() -> None:
    model, other = twins()
    first = longshore.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    train(model, first, range(2))
    second = longshore.SGD(other.parameters(), lr=7.0)
    second.load_state_dict(first.state_dict())
    other.load_state_dict(model.state_dict())
    train(model, first, range(2, 4))
    train(other, second, range(2, 4))
    assert same_weights(model, other)


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_bias_correction_is_an_option_of_each_group(kind: str) -> None:
    model, other = twins()
    corrected = getattr(longshore, kind)(other.parameters(), lr=1e-2)
    groups = [{"params": model[0].parameters(), "bias_correction": False}, {"params": model[3].parameters()}]
    optimizer = getattr(longshore, kind)(groups, lr=1e-2)
    assert [group["bias_correction"] for group in optimizer.param_groups] == [False, True]
    before = model[0].weight.clone()
    for each in (model, other):
        loss_of(each, 0).backward()
    gradient = model[0].weight.grad.clone()
    optimizer.step()
    corrected.step()
    # Without correction the first step is 0.1 g / (sqrt(0.001) |g|) of the learning rate; with it, 1.
    moved = (before * (1 - 1e-2 * (1e-2 if kind == "AdamW" else 0.0)) - model[0].weight) / 1e-2
    torch.testing.assert_close(moved, gradient.sign() * 0.1 / 0.001**0.5, rtol=1e-2, atol=1e-2)
    assert torch.equal(model[3].weight, other[3].weight)
    saved = optimizer.state_dict()
    again = getattr(longshore, kind)([{"params": model[0].parameters()}, {"params": model[3].parameters()}], lr=1e-2)
    again.load_state_dict(saved)
    assert [group["bias_correction"] for group in again.param_groups] == [False, True]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("Lion", {"lr": -1.0}, "lr must be a number of at least 0"),
        ("Lion", {"betas": (0.9, 1.0)}, r"betas\[1\] must be at least 0 and below 1"),
        ("Lion", {"betas": 0.9}, "betas is a pair"),
        ("Lion", {"weight_decay": -0.1}, "weight_decay must be a number of at least 0"),
        ("Adagrad", {"lr_decay": -0.1}, "lr_decay must be a number of at least 0"),
        ("Adagrad", {"eps": -0.1}, "eps must be a number of at least 0"),
        ("Adagrad", {"initial_accumulator_value": -0.1}, "initial_accumulator_value must be a number of at least 0"),
        ("Adagrad", {"differentiable": True}, "differentiable=True is not supported"),
        ("SGD", {"momentum": -0.1}, "momentum must be a number of at least 0"),
        ("SGD", {"nesterov": True}, "nesterov=True needs a momentum above 0"),
        ("SGD", {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "no dampening"),
    ],
)
def test_options_that_are_refused(kind: str, options: dict[str, Any], message: str) -> None:
    parameters = [nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match=message):
        getattr(longshore, kind)(parameters, **options)
    good = getattr(longshore, kind)(parameters)
    if "initial_accumulator_value" not in options:
        with pytest.raises(ValueError, match=message):
            good.add_param_group({"params": [nn.Parameter(torch.ones(2))], **options})
    assert len(good.param_groups) == 1


@pytest.mark.parametrize(("kind", "option"), [("Lion", "lr"), ("Adagrad", "lr_decay"), ("SGD", "momentum")])
def test_numbers_that_are_none(kind: str, option: str) -> None:
    with pytest.raises(TypeError, match=f"{option} is a number"):
        getattr(longshore, kind)([nn.Parameter(torch.ones(3))], **{option: "0.1"})


def test_adagrads_sums_begin_with_one_value_for_all_groups() -> None:
    """torch ignores a group's own; whoever writes one expects it to count."""
    a, b = (nn.Parameter(torch.ones(3)) for _ in range(2))
    with pytest.raises(ValueError, match="one value for all groups"):
        longshore.Adagrad([{"params": [a], "initial_accumulator_value": 0.5}, {"params": [b]}])
    theirs = torch.optim.Adagrad([a], initial_accumulator_value=0.5)
    ours = longshore.Adagrad([b])
    ours.load_state_dict(theirs.state_dict())  # the sums are in the state
    assert ours.param_groups[0]["initial_accumulator_value"] == 0
    assert torch.equal(ours.state[b]["sum"], torch.full((3,), 0.5))


@pytest.mark.parametrize(
    ("kind", "state", "message"),
    [
        ("Lion", {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}, "keeps step, exp_avg, master"),
        ("Lion", {"step": 1}, "lacks exp_avg, and has step; load it with the class that saved it"),
        ("Adagrad", {"step": 1}, "lacks sum"),
        ("Adagrad", {"sum": torch.zeros(3)}, "lacks step"),
        ("SGD", {"step": 1, "sum": torch.zeros(3)}, "unknown state 'sum'; longshore keeps momentum_buffer, master"),
        ("SGD", {"momentum_buffer": torch.zeros(4)}, r"momentum_buffer is .*\[4\]"),
    ],
)
def test_states_of_another_rule_are_refused(kind: str, state: dict[str, Any], message: str) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = getattr(longshore, kind)([parameter])
    saved = {**optimizer.state_dict(), "state": {0: state}}
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert parameter not in optimizer.state


def test_states_that_others_leave_out() -> None:
    parameter = nn.Parameter(torch.ones(3))
    lion, sgd = longshore.Lion([parameter]), longshore.SGD([parameter], momentum=0.9)
    lion.load_state_dict({**lion.state_dict(), "state": {0: {"exp_avg": torch.ones(3)}}})
    assert torch.equal(lion.state[parameter]["exp_avg"], torch.ones(3))
    sgd.load_state_dict({**sgd.state_dict(), "state": {0: {"momentum_buffer": None}}})
    assert sgd.state[parameter].get("momentum_buffer") is None


@pytest.mark.parametrize("text", ["1e-3", "auto"])
def test_a_number_as_text_is_refused_with_what_yaml_reads(text: str) -> None:
    message = f"lr is a number, not the text '{text}'; YAML reads 1e-3 as text, and 1.0e-3 as a number"
    for kind in (longshore.AdamW, longshore.SGD, longshore.Lion, longshore.Adagrad):
        with pytest.raises(TypeError, match=message):
            kind([nn.Parameter(torch.ones(3))], lr=text)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"betas\[1\] is a number, not the text"):
        longshore.AdamW([nn.Parameter(torch.ones(3))], betas=(0.9, text))  # pyright: ignore[reportArgumentType]
    theirs = torch.optim.NAdam([nn.Parameter(torch.ones(3))])
    theirs.param_groups[0]["lr"] = text
    with pytest.warns(UserWarning, match="has no kernel"):
        optimizer = longshore.from_client(torch.optim.NAdam([nn.Parameter(torch.ones(3))]))
    optimizer.param_groups[0]["lr"] = text
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    for refuse in (lambda: longshore.from_client(theirs), optimizer.step):
        with pytest.raises(TypeError, match=message):
            refuse()

"""Optimizers that a DeepSpeed file names, and those that a client brings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from support import PlainLion, PlainLoop, loss_of, small_model
from torch import nn

import longshore
from engine import optimizer_cases
from engine.files import assert_same, assert_trains_like, file, gradients_of, started, train, without
from longshore.kernels.reference import rule_step
from longshore.optim.rules.adam import AdamRule
from longshore.optim.tiled_optimizer import TiledOptimizer

ADAM: dict[str, Any] = {"lr": 3e-3, "betas": [0.8, 0.95], "eps": 1e-5, "weight_decay": 0.1}
LION: dict[str, Any] = {"lr": 1e-3, "betas": [0.7, 0.9], "weight_decay": 0.1}
ADAGRAD: dict[str, Any] = {"lr": 3e-2, "lr_decay": 0.1, "eps": 1e-6, "weight_decay": 0.1}
SGD: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1}
T = torch.optim

NAMED = {
    "AdamW": ("AdamW", ADAM, T.AdamW, ADAM),
    "AdamW, in any case": ("adamw", ADAM, T.AdamW, ADAM),
    "AdamW that maximizes": ("AdamW", {**ADAM, "maximize": True}, T.AdamW, {**ADAM, "maximize": True}),
    "Adam with adam_w_mode": ("Adam", {**ADAM, "adam_w_mode": True}, T.AdamW, ADAM),
    "Adam without adam_w_mode": ("Adam", {**ADAM, "adam_w_mode": False}, T.Adam, ADAM),
    "Lion": ("Lion", LION, PlainLion, LION),
    "Lion that maximizes": ("Lion", {**LION, "maximize": True}, PlainLion, {**LION, "maximize": True}),
    "Adagrad": ("Adagrad", ADAGRAD, T.Adagrad, ADAGRAD),
    "SGD with momentum": ("SGD", SGD, T.SGD, SGD),
    "SGD with nesterov": ("SGD", {**SGD, "nesterov": True}, T.SGD, {**SGD, "nesterov": True}),
    "SGD with dampening": ("SGD", {**SGD, "dampening": 0.3}, T.SGD, {**SGD, "dampening": 0.3}),
    "SGD, plain": ("SGD", {"lr": 1e-3}, T.SGD, {"lr": 1e-3}),
}
"""Name and parameters in the file; the plain twin and its parameters."""

DEFAULTS = {
    "AdamW": (T.AdamW, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}),
    "Adam": (T.Adam, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}),
    "Lion": (PlainLion, {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}),
    "Adagrad": (T.Adagrad, {"lr": 1e-2, "eps": 1e-10}),
    "SGD": (T.SGD, {"lr": 1e-3}),
}
"""What a file that gives no parameters means, in DeepSpeed's words."""

DECAY_NOTE = "ignore:optimizer.type Adam means AdamW in a DeepSpeed file"


def named(kind: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
    section = {"type": kind} if params is None else {"type": kind, "params": params}
    return file(optimizer=section)


@pytest.mark.filterwarnings(DECAY_NOTE)
@pytest.mark.parametrize("name", NAMED)
def test_params(name: str) -> None:
    kind, params, twin, options = NAMED[name]
    assert_trains_like(named(kind, params), lambda parameters: PlainLoop(parameters, twin, **options), steps=4)


@pytest.mark.parametrize("kind", DEFAULTS)
def test_types(kind: str) -> None:
    """Each type with its defaults."""
    twin, options = DEFAULTS[kind]
    assert_trains_like(named(kind), lambda parameters: PlainLoop(parameters, twin, **options))


def test_bias_correction() -> None:
    """Off, the bias corrections are 1; torch cannot say that, so the twin is the oracle of the kernels."""
    twin = small_model()
    parameters = list(twin.parameters())
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    with started(named("AdamW", {**ADAM, "bias_correction": False})) as engine:
        for step in range(3):
            train(engine, [loss_of(engine, step)])
            rule = AdamRule(
                lr=3e-3, beta1=0.8, beta2=0.95, eps=1e-5, weight_decay=0.1, step=step + 1, decoupled=True,
                maximize=False, bias_correction=False,
            )  # fmt: skip
            for index, gradient in enumerate(gradients_of(twin, [loss_of(twin, step)])):
                new, *rest = rule_step((parameters[index].detach(), *moments[index]), gradient, rule)
                moments[index] = (rest[0], rest[1])
                with torch.no_grad():
                    parameters[index].copy_(new)
            assert_same(engine.module, twin, step)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks(stage: int, two_ranks: Ranks) -> None:
    """Every kind, sharded."""
    cases = [NAMED[name] for name in NAMED if name != "Adam with adam_w_mode"]
    two_ranks(optimizer_cases.by_name, stage, cases)


def test_groups_keep_their_own_settings() -> None:
    """What a group does not say is the file's."""
    model, twin = small_model(), small_model()

    def groups(of: nn.Sequential) -> list[dict[str, Any]]:
        return [
            {"params": list(of[0].parameters()), "lr": 7e-3},
            {"params": [*of[2].parameters(), *of[3].parameters()], "weight_decay": 0.4, "betas": (0.5, 0.9)},
        ]

    loop = PlainLoop(groups(twin), **{**ADAM, "betas": tuple(ADAM["betas"])})
    with started(named("AdamW", ADAM), model, model_parameters=groups(model)) as engine:
        assert [group["lr"] for group in engine.optimizer.param_groups] == [7e-3, 3e-3] == engine.get_lr()
        for step in range(3):
            train(engine, [loss_of(engine, step)])
            loop.step(gradients_of(twin, [loss_of(twin, step)]))
            assert_same(model, twin, step)


CLIENTS: dict[str, tuple[Callable[[Any], Any], type, dict[str, Any]]] = {
    "torch's AdamW": (lambda p: T.AdamW(p, lr=3e-3, weight_decay=0.1), T.AdamW, {"lr": 3e-3, "weight_decay": 0.1}),
    "torch's Adam": (lambda p: T.Adam(p, lr=3e-3, weight_decay=0.1), T.Adam, {"lr": 3e-3, "weight_decay": 0.1}),
    "torch's SGD": (lambda p: T.SGD(p, **SGD), T.SGD, SGD),
    "torch's Adagrad": (lambda p: T.Adagrad(p, **ADAGRAD), T.Adagrad, ADAGRAD),
    "our AdamW": (lambda p: longshore.AdamW(p, lr=3e-3, weight_decay=0.1), T.AdamW, {"lr": 3e-3, "weight_decay": 0.1}),
    "our Lion": (lambda p: longshore.Lion(p, lr=1e-3), PlainLion, {"lr": 1e-3}),
    "torch's RMSprop": (lambda p: T.RMSprop(p, lr=1e-3, momentum=0.9), T.RMSprop, {"lr": 1e-3, "momentum": 0.9}),
    "torch's NAdam": (lambda p: T.NAdam(p, lr=1e-3), T.NAdam, {"lr": 1e-3}),
}


@pytest.mark.filterwarnings(r"ignore:torch\.optim\.\w+ has no kernel in longshore")
@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize("name", CLIENTS)
def test_clients_optimizers(name: str, as_function: bool) -> None:
    make, kind, options = CLIENTS[name]
    model, twin = small_model(), small_model()
    given = make if as_function else make(list(model.parameters()))
    loop = PlainLoop(twin.parameters(), kind, **options)
    with started(without(file(), "optimizer"), model, optimizer=given) as engine:
        assert isinstance(engine.optimizer, (TiledOptimizer, torch.optim.Optimizer))
        for step in range(3):
            train(engine, [loss_of(engine, step)])
            loop.step(gradients_of(twin, [loss_of(twin, step)]))
            assert_same(model, twin, step)


@pytest.mark.parametrize("stage", [0, 2])
def test_clients_optimizers_on_two_ranks(stage: int, two_ranks: Ranks) -> None:
    two_ranks(optimizer_cases.clients, stage)


@pytest.mark.quick(0)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_a_script_keeps_of_its_optimizer_counts(stage: int, two_ranks: Ranks) -> None:
    two_ranks(optimizer_cases.what_a_script_keeps_of_its_optimizer, stage)


def test_where_initialize_fails_the_clients_optimizer_stays() -> None:
    model = small_model()
    client = torch.optim.AdamW(model.parameters(), fused=True)
    foreign = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(small_model().parameters(), lr=1.0))
    with pytest.raises(ValueError, match="was built on an optimizer"):
        longshore.initialize(model=model, config=without(file(), "optimizer"), optimizer=client, lr_scheduler=foreign)
    assert type(client) is torch.optim.AdamW
    before = model[0].weight.detach().clone()
    loss_of(model, 0).backward()
    client.step()
    assert not torch.equal(before, model[0].weight)


def test_what_has_no_kernel_is_said_once() -> None:
    model = small_model()
    client = T.RMSprop(model.parameters())
    with pytest.warns(UserWarning, match=r"torch\.optim\.RMSprop has no kernel in longshore") as said:
        engine = longshore.initialize(model=model, config=without(file(), "optimizer"), optimizer=client).engine
    assert len(said) == 1
    train(engine, [loss_of(engine, 0)])
    engine.destroy()


def test_a_clients_optimizer_goes_on_from_its_state() -> None:
    model, twin = small_model(), small_model()
    loop = PlainLoop(twin.parameters(), lr=3e-3)
    client = T.AdamW(model.parameters(), lr=3e-3, fused=True)
    for step in range(2):
        for parameter, gradient in zip(model.parameters(), gradients_of(model, [loss_of(model, step)]), strict=True):
            parameter.grad = gradient
        client.step()
        client.zero_grad()
        loop.step(gradients_of(twin, [loss_of(twin, step)]))
    # torch rounds the last elements of a tensor differently; from here on the state is the same.
    with torch.no_grad():
        for index, (mine, theirs) in enumerate(zip(model.parameters(), twin.parameters(), strict=True)):
            theirs.copy_(mine)
            loop.masters[index][: mine.numel()] = mine.detach().reshape(-1)
            for name in ("exp_avg", "exp_avg_sq"):
                loop.state(index, name).copy_(client.state[mine][name])
    with started(without(file(), "optimizer"), model, optimizer=client) as engine:
        for step in range(2, 4):
            train(engine, [loss_of(engine, step)])
            loop.step(gradients_of(twin, [loss_of(twin, step)]))
            assert_same(model, twin, step)


@pytest.mark.parametrize(
    "kind, why", [("LBFGS", "evaluates the model several times"), ("Adafactor", "rows and columns")]
)
def test_what_looks_at_whole_parameters_is_refused_by_name(kind: str, why: str) -> None:
    model = small_model()
    with pytest.raises(ValueError, match=rf"torch\.optim\.{kind} cannot be stepped in tiles: .*{why}"):
        longshore.initialize(
            model=model, config=without(file(), "optimizer"), optimizer=getattr(T, kind)(model.parameters())
        )
    with pytest.raises(ValueError, match=rf'optimizer\.type = "{kind}": is not supported'):
        longshore.initialize(model=model, config=named(kind))


@pytest.mark.needs_torch("torch.optim.Muon")
def test_torchs_muon_under_an_engine_of_one_rank() -> None:
    models = [nn.Sequential(nn.Linear(6, 9, bias=False), nn.Tanh(), nn.Linear(9, 4, bias=False)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain = T.Muon(models[0].parameters(), lr=0.02)
    client = T.Muon(models[1].parameters(), lr=0.02)
    engine, *_ = longshore.initialize(model=models[1], config=without(file(), "optimizer"), optimizer=client)
    for step in range(3):
        batch = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        models[0](batch).square().sum().backward()
        plain.step()
        plain.zero_grad()
        engine.backward(engine(batch).square().sum())
        engine.step()
    engine.destroy()
    assert all(torch.equal(*pair) for pair in zip(models[0].parameters(), models[1].parameters(), strict=True))

"""Every object that a script has after ``initialize()``, with changes to it: each is seen at the next step, or an
error.

A change is a function of a :class:`Script`, which is an engine's or plain PyTorch's; both are changed alike.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from support import batch, model_of_sixteens, same_weights
from torch import Tensor, nn

import longshore
from engine.files import assert_same, file, without

OPTIONS: dict[str, Any] = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


class Script:
    """A model with an optimizer and a schedule, all of which the script made itself and keeps.

    Attributes:
        group, state: the optimizer's, as the script had them before ``initialize()``.
        schedule: of the optimizer; the script steps it after each step.
        parameters: all of the model's.
        config: what ``initialize()`` was given; plain PyTorch has none.
    """

    def __init__(self) -> None:
        self.model: Any = model_of_sixteens()
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), fused=True, **OPTIONS)
        self.group = self.optimizer.param_groups[0]
        self.schedule: Any = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.5**step)
        self.parameters: list[Any] = list(self.model.parameters())
        self.config: Any = None
        self.engine: Any = None

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def backward(self, step: int) -> None:
        loss: Tensor = self.model(batch(step)).pow(2).sum()
        if self.engine is None:
            loss.backward()
        else:
            self.engine.backward(loss)

    def step(self) -> None:
        (self.optimizer if self.engine is None else self.engine).step()
        self.optimizer.zero_grad()
        self.schedule.step()

    def train(self, steps: range) -> None:
        for step in steps:
            self.backward(step)
            self.step()


@contextlib.contextmanager
def with_an_engine(stage: int) -> Iterator[Script]:
    script = Script()
    script.config = without(file(zero_optimization={"stage": stage, "reduce_bucket_size": 700}), "optimizer")
    made = longshore.initialize(model=script.model, config=script.config, optimizer=script.optimizer)
    script.engine = made.engine
    script.parameters = list(script.model.parameters())  # at stage 3 not those from before: test_gather.py has these
    try:
        yield script
    finally:
        script.engine.destroy()


class Change(NamedTuple):
    """What a script does between two steps."""

    make: Callable[[Script], Any]
    within: bool = False
    """After a backward whose gradient has not been stepped yet."""
    errors: Mapping[int, str] = MappingProxyType({})
    """What the error (or the warning) says that comes at once or at the next step, by stage; one rank is stage 0. Where
    there is none, the weights are those of plain PyTorch."""


def _everywhere(error: str) -> Mapping[int, str]:
    return dict.fromkeys((0, 2, 3), error)


_REDUCED = dict.fromkeys((2, 3), "after it had been reduced with those of the other ranks")


def _load_former_state(script: Script) -> None:
    saved = copy.deepcopy(script.optimizer.state_dict())
    script.train(range(7, 9))
    script.optimizer.load_state_dict(saved)


def _add_group(script: Script) -> None:
    frozen = script.model[0]
    script.group["params"][:] = [
        each for each in script.group["params"] if all(each is not p for p in frozen.parameters())
    ]
    script.optimizer.add_param_group({"params": list(frozen.parameters()), "lr": 1e-1})
    script.schedule.base_lrs.append(1e-1)
    script.schedule.lr_lambdas.append(lambda _: 1.0)
    script.optimizer.param_groups[-1]["initial_lr"] = 1e-1


def _schedule_again(script: Script) -> None:
    script.schedule = torch.optim.lr_scheduler.ConstantLR(script.optimizer, factor=0.25)


def _replace_group(script: Script) -> None:
    script.optimizer.param_groups[0] = {**script.group, "weight_decay": 0.7}


def _every_weight(do: Callable[[Tensor], Any]) -> Callable[[Script], None]:
    def change(script: Script) -> None:
        for parameter in script.parameters:
            do(parameter)

    return change


def _group(key: str, value: Any) -> Change:
    return Change(lambda script: script.group.update({key: value}))


def _given(*keys: str, value: Any, says: str) -> Change:
    def change(script: Script) -> None:
        if script.config is not None:
            content = script.config
            for key in keys[:-1]:
                content = content[key]
            content[keys[-1]] = value

    return Change(change, errors=_everywhere(says))


def _set_grads(script: Script) -> None:
    for index, parameter in enumerate(script.parameters):
        parameter.grad = torch.full_like(parameter, 0.01 * (index + 1))


def _new_weights(script: Script) -> None:
    torch.manual_seed(3)
    given = {name: torch.randn(each.shape) for name, each in model_of_sixteens().state_dict().items()}
    script.model.load_state_dict(given)


def _initialise(script: Script) -> None:
    torch.manual_seed(4)
    script.model.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)


CHANGES: dict[str, Change] = {
    "optimizer: a group is added": Change(_add_group),
    "optimizer: zero_grad()": Change(lambda script: script.optimizer.zero_grad(), within=True),
    "optimizer: load_state_dict()": Change(_load_former_state),
    "optimizer: a hook before its step": Change(
        lambda script: script.optimizer.register_step_pre_hook(lambda of, *_: of.param_groups[0].update(lr=0.2))
    ),
    "groups: lr": _group("lr", 0.2),
    "groups: lr, a tensor": Change(lambda script: script.group.update(lr=torch.tensor(0.2))),
    "groups: betas": _group("betas", (0.5, 0.6)),
    "groups: eps": _group("eps", 1e-2),
    "groups: weight_decay": _group("weight_decay", 0.9),
    "groups: maximize": _group("maximize", True),
    "groups: a parameter leaves": Change(lambda script: script.group["params"].pop(0)),
    "groups: another dictionary": Change(_replace_group),
    "groups: another list": Change(
        lambda script: setattr(script.optimizer, "param_groups", [{**script.group, "weight_decay": 0.7}])
    ),
    "state: a moment": Change(lambda script: [script.state[p]["exp_avg"].zero_() for p in script.parameters]),
    "state: a tensor in it": Change(
        lambda script: [script.state[p].update(exp_avg_sq=torch.ones_like(p)) for p in script.parameters],
        errors={3: "which is whole as value.full_tensor()"},
    ),
    "state: a whole tensor in it": Change(
        lambda script: [script.state[p].update(exp_avg_sq=torch.ones(p.shape)) for p in script.parameters]
    ),
    "state: the count of steps": Change(lambda script: [script.state[p]["step"].zero_() for p in script.parameters]),
    "state: emptied": Change(lambda script: script.state.clear()),
    "state: of one parameter": Change(lambda script: script.state.pop(script.parameters[1])),
    "schedule: its rates": Change(lambda script: script.schedule.base_lrs.__setitem__(0, 0.3)),
    "schedule: load_state_dict()": Change(
        lambda script: script.schedule.load_state_dict({**script.schedule.state_dict(), "last_epoch": -1})
    ),
    "schedule: another one": Change(_schedule_again),
    "model: load_state_dict()": Change(_new_weights),
    "model: initialised again": Change(_initialise, errors={3: "DTensor random operators"}),
    "model: zero_grad()": Change(lambda script: script.model.zero_grad(), within=True, errors=_REDUCED),
    "model: a part is frozen": Change(lambda script: script.model[0].requires_grad_(False)),
    "model: a hook of forward": Change(
        lambda script: script.model[0].register_forward_hook(lambda _, __, output: output * 2)
    ),
    "model: a hook of backward": Change(
        lambda script: script.model[3].register_full_backward_hook(lambda _, given, __: tuple(g * 2 for g in given)),
        errors={3: "FSDP2-wrapped module"},
    ),
    "model: a part is replaced": Change(lambda script: script.model.__setitem__(1, nn.Tanh())),
    "parameters: copy_()": Change(_every_weight(lambda p: p.detach().copy_(torch.full_like(p, 0.1)))),
    "parameters: data.mul_()": Change(_every_weight(lambda p: p.data.mul_(0.5))),
    "parameters: data assigned": Change(
        _every_weight(lambda p: setattr(p, "data", p.data * 0.5)), errors={3: "0.weight was given other memory"}
    ),
    "parameters: through NumPy": Change(
        _every_weight(lambda p: p.detach().numpy().__imul__(0.5)), errors={3: ".numpy() is not supported"}
    ),
    "parameters: .grad assigned": Change(_set_grads, within=True, errors=_REDUCED),
    "parameters: .grad edited": Change(
        _every_weight(lambda p: p.grad.mul_(2)),
        within=True,
        errors=_everywhere("its gradient is on the host (as under every engine"),
    ),
    "parameters: a hook of the gradient": Change(
        _every_weight(lambda p: p.register_hook(lambda g: g * 2)), errors={3: "3.bias has a hook on its gradient"}
    ),
    "parameters: requires_grad": Change(lambda script: script.parameters[0].requires_grad_(False)),
    "configuration: a setting": _given("gradient_clipping", value=1.0, says="gradient_clipping was 0.0 and is 1.0"),
    "configuration: inside a section": _given(
        "zero_optimization", "stage", value=1, says="zero_optimization.stage was"
    ),
}


def check(name: str, stage: int) -> None:
    """Change what is kept after two steps. On several ranks, these have the same batches, so that the average of their
    gradients is what each has."""
    change = CHANGES[name]
    plain, unchanged = Script(), Script()
    _run(plain, change)
    _run(unchanged, change._replace(make=lambda _: None))
    assert change.errors or not same_weights(plain.model, unchanged.model), "the change changes nothing"
    with with_an_engine(stage) as ours:
        if (expected := change.errors.get(stage if ours.engine.world_size > 1 else 0)) is None:
            _run(ours, change)
            assert_same(ours.model, plain.model, "after the change")
            return
        with pytest.raises(Exception, match=re.escape(expected)):
            _run(ours, change)


def _run(script: Script, change: Change) -> None:
    script.train(range(2))
    if change.within:
        script.backward(5)
    change.make(script)
    script.train(range(2, 5))

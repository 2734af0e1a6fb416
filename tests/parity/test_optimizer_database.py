"""The database with which torch tests its own optimizers, as the installed torch has it: each option of each entry
trains as in torch or is refused by name, and what torch refuses is refused. Whatever a newer torch adds is expected to
equal torch's, and fails here until it does."""

from __future__ import annotations

import copy
import importlib
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import longshore
from longshore.engine.optimizers import from_client


def _database() -> Any:
    """Import torch's database without torch's test harness, which changes global settings of torch when it is imported
    and gives the database only decorators of tests."""
    package = "torch.testing._internal"
    harness = ("common_device_type", "common_methods_invocations", "common_utils")
    mocks = {f"{package}.{name}": mock.MagicMock(_TestParametrizer=object) for name in harness}
    with mock.patch.dict(sys.modules, mocks):
        return importlib.import_module(f"{package}.common_optimizers")


DATABASE = _database()
KERNELS = ("Adagrad", "Adam", "AdamW", "Muon", "SGD")
NOT_IN_TILES = ("Adafactor", "LBFGS", "SparseAdam")
REFUSED_OPTIONS = ("amsgrad", "capturable", "differentiable")
SHAPES = ((64,), (8, 16), (4, 4, 8), (128, 1))  # torch's loops have no scalar tail
MATRICES = ((64, 3), (8, 16), (5, 7), (128, 1))  # which are all that Muon steps
NEVER = 3
IDLE = {1: (1, 4), NEVER: range(6)}
"""Steps in which a parameter has no gradient, by the parameter's place."""


def refusal(name: str, options: dict[str, Any]) -> str | None:
    """Return what the error says for an option that torch takes, or None where training is to equal torch's."""
    if name in NOT_IN_TILES:
        return rf"torch\.optim\.{name} cannot be stepped in tiles"
    switched_on = (each for each in REFUSED_OPTIONS if options.get(each))
    return next((rf"{each}=True is not supported" for each in switched_on), None)


def label(*parts: str) -> str:
    return re.sub(r"\W+", "_", "-".join(parts).replace("-", "___")).replace("___", "-")


def _entries() -> Iterator[Any]:
    # What torch has for other devices only, it says of how a step is computed. Ours takes it anywhere, or nowhere.
    for info in DATABASE.optim_db:
        seen = set()
        for device in ("cpu", "cuda", "mps"):
            for each in info.optim_inputs_func(device=device):
                if repr(each.kwargs) not in seen:
                    seen.add(repr(each.kwargs))
                    yield pytest.param(info, each.kwargs, id=label(info.name, each.desc, str(len(seen))))


def _errors() -> Iterator[Any]:
    for info in DATABASE.optim_db:
        for each in info.optim_error_inputs_func("cpu", torch.float32):
            yield pytest.param(info, each, id=label(info.name, each.optimizer_error_input.desc))


STEPPED = pytest.mark.parametrize(
    "info", [each for each in DATABASE.optim_db if each.name not in NOT_IN_TILES], ids=lambda info: info.name
)


def parameters(name: str) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = MATRICES if name == "Muon" else SHAPES
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def theirs(name: str, params: Any, options: dict[str, Any]) -> torch.optim.Optimizer:
    """Make torch's optimizer in the variant whose bits ours has."""
    how = {} if name == "Muon" else {"foreach": False, **({"fused": True} if name in KERNELS else {})}
    return getattr(torch.optim, name)(params, **{**copy.deepcopy(options), **how})


def ours(name: str, params: Any, options: dict[str, Any], client: bool = False) -> Any:
    """Make ours: directly where there is a kernel, otherwise or as a ``client`` from torch's."""
    options, offload = copy.deepcopy(options), longshore.Offload(tile_numel=100, threads=1)
    if not (client or name not in KERNELS):
        return getattr(longshore, name)(params, **options, offload=offload)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"torch\.optim\.\w+ has no kernel in longshore|.* with duplicate parameters")
        return from_client(getattr(torch.optim, name)(params, **options), release_gradients=False, offload=offload)


def train(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for place, parameter in enumerate(params):
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if step in IDLE.get(place, ()) else gradient
        optimizer.step()


def check_equal(mine: list[nn.Parameter], our: Any, his: list[nn.Parameter], their: torch.optim.Optimizer) -> None:
    """Check that weights, states and step counts are the same bits."""
    for place, (a, b) in enumerate(zip(mine, his, strict=True)):
        assert torch.equal(a, b), place
    found, expected = our.state_dict()["state"], their.state_dict()["state"]
    for place, states in expected.items():
        values = {name: value for name, value in states.items() if value is not None}
        if place == NEVER:
            assert place not in found  # torch's Adagrad has sums before the first step
            continue
        assert found[place].keys() == values.keys()
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(found[place][name]), torch.as_tensor(value)), (place, name)


def trains_as_in_torch(name: str, options: dict[str, Any], flags: dict[str, Any]) -> None:
    """Train both, exchange their states in the middle, and train on."""
    mine, his = parameters(name), parameters(name)
    our, their = ours(name, mine, {**options, **flags}), theirs(name, his, options)
    train(mine, our, range(3))
    train(his, their, range(3))
    check_equal(mine, our, his, their)
    loaded_by_ours, loaded_by_theirs = ours(name, mine, {}), theirs(name, his, {})
    loaded_by_ours.load_state_dict(copy.deepcopy(their.state_dict()))
    loaded_by_theirs.load_state_dict(copy.deepcopy(our.state_dict()))
    train(mine, loaded_by_ours, range(3, 6))
    train(his, loaded_by_theirs, range(3, 6))
    check_equal(mine, loaded_by_ours, his, loaded_by_theirs)


def test_the_database_has_every_optimizer_of_torch() -> None:
    classes = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    names = {each.__name__ for each in classes if issubclass(each, torch.optim.Optimizer)} - {"Optimizer"}
    assert {info.name for info in DATABASE.optim_db} == names


@pytest.mark.quick(0)
@pytest.mark.parametrize(("info", "options"), [*_entries()])
def test_each_option_trains_as_in_torch_or_is_refused_by_name(info: Any, options: dict[str, Any]) -> None:
    if words := refusal(info.name, options):
        for client in (True, False) if info.name in KERNELS else (True,):
            with pytest.raises(ValueError, match=words):
                ours(info.name, parameters(info.name), options, client=client)
    # What is left of them without the flags that say how a step is computed.
    options = {name: value for name, value in options.items() if name not in ("capturable", "differentiable")}
    if refusal(info.name, options) is None:
        trains_as_in_torch(info.name, options, {})


@STEPPED
def test_flags_of_how_a_step_is_computed_change_no_bit_or_are_refused_by_name(info: Any) -> None:
    for flag in info.supported_impls:
        if words := refusal(info.name, {flag: True}):
            with pytest.raises(ValueError, match=words):
                ours(info.name, parameters(info.name), {flag: True})
        else:
            for value in (True, False):
                trains_as_in_torch(info.name, {}, {flag: value})


@STEPPED
def test_schedulers_change_the_same_steps(info: Any) -> None:
    for make in info.scheduler_inputs:
        mine, his = parameters(info.name), parameters(info.name)
        our, their = ours(info.name, mine, {"lr": 0.01}), theirs(info.name, his, {"lr": 0.01})
        pairs = [(scheduler(our), scheduler(their)) for scheduler in make]
        for step in range(4):
            train(mine, our, range(step, step + 1))
            train(his, their, range(step, step + 1))
            for scheduler in (each for pair in pairs for each in pair):
                arguments = (1.0,) if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else ()
                scheduler.step(*arguments)
        assert our.param_groups[0]["lr"] == their.param_groups[0]["lr"]
        check_equal(mine, our, his, their)


@pytest.mark.parametrize(("info", "error"), [*_errors()])
def test_what_torch_refuses_is_refused(info: Any, error: Any) -> None:
    given = error.optimizer_error_input
    params = parameters(info.name) if given.params is None else given.params
    if given.kwargs.get("foreach") and refusal(info.name, given.kwargs) is None:
        # torch's foreach kernels cannot do it; here foreach has no effect, so there is nothing to refuse.
        trains_as_in_torch(info.name, {**given.kwargs, "foreach": False}, {"foreach": True})
        return
    with pytest.raises((ValueError, TypeError, longshore.GradientError)):
        ours(info.name, params, given.kwargs).step()

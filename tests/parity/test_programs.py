"""Small programs that use an optimizer in legal and less usual ways, each beside torch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim.swa_utils import SWALR, AveragedModel

import longshore

Make = Callable[[Any], Any]


def net() -> nn.Sequential:
    """Sizes are multiples of 64 elements: torch's loops have no scalar tail."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32, bias=False), nn.GELU(), nn.Linear(32, 16, bias=False))


def batch(step: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> Tensor:
    return model(batch(step)).pow(2).mean()


def train(model: nn.Module, optimizer: Any, steps: range, loss: Callable[[nn.Module, int], Tensor] = loss_of) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


def values(*modules: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for module in modules for value in module.state_dict().values()]


def averaged_weights(make: Make) -> list[Tensor]:
    """Stochastic weight averaging, and training that goes on from the average."""
    model = net()
    optimizer, average = make(model.parameters()), AveragedModel(model)
    scheduler = SWALR(optimizer, 0.05, anneal_epochs=2)
    for step in range(5):
        train(model, optimizer, range(step, step + 1))
        average.update_parameters(model)
        scheduler.step()
    model.load_state_dict(average.module.state_dict())
    train(model, optimizer, range(5, 7))
    return values(average, model)


def evaluated_on_an_average(make: Make) -> list[Tensor]:
    """The parameters' memory is swapped with an exponential average, and back."""
    model = net()
    optimizer, average = make(model.parameters()), [each.detach().clone() for each in model.parameters()]
    for step in range(4):
        train(model, optimizer, range(step, step + 1))
        for mean, parameter in zip(average, model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)
        own = [each.data for each in model.parameters()]
        for swapped in (average, own):
            for parameter, data in zip(model.parameters(), swapped, strict=True):
                parameter.data = data
            loss_of(model, step)
    return values(model)


def scaled_losses_one_of_them_infinite(make: Make) -> list[Tensor]:
    model = net()
    optimizer, scaler = make(model.parameters()), torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step) * (float("inf") if step == 2 else 1.0)).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**5  # it grew twice, and was halved once
    return values(model)


def functional_gradients(make: Make) -> list[Tensor]:
    model = net()
    optimizer = make(model.parameters())
    parameters = dict(model.named_parameters())
    for step in range(4):
        detached = {name: each.detach() for name, each in parameters.items()}

        def loss(given: dict[str, Tensor], step: int = step) -> Tensor:
            return torch.func.functional_call(model, given, (batch(step),)).pow(2).mean()

        for name, gradient in torch.func.grad(loss)(detached).items():
            parameters[name].grad = gradient
        optimizer.step()
    return values(model)


def normalized_weights(make: Make) -> list[Tensor]:
    model = net()
    weight_norm(model[0])
    spectral_norm(model[2])
    train(model, make(model.parameters()), range(4))
    return values(model)


def a_merged_adapter(make: Make) -> list[Tensor]:
    model = net().requires_grad_(False)
    down, up = nn.Parameter(torch.full((16, 4), 0.1)), nn.Parameter(torch.zeros(4, 32))
    optimizer = make([down, up])

    def loss(model: Any, step: int) -> Tensor:
        return model[2](model[1](model[0](batch(step)) + batch(step) @ down @ up)).pow(2).mean()

    train(model, optimizer, range(3), loss)
    with torch.no_grad():
        model[0].weight += (down @ up).t()  # pyright: ignore
        up.zero_()
    train(model, optimizer, range(3, 6), loss)
    return [*values(model), down.detach(), up.detach()]


def a_search_for_a_learning_rate(make: Make) -> list[Tensor]:
    """The rate grows until the search ends; then model and optimizer are what they were before."""
    model = net()
    optimizer = make(model.parameters())
    train(model, optimizer, range(2))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 3.0)
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        scheduler.step()
    model.load_state_dict(before[0])
    optimizer.load_state_dict(before[1])
    train(model, optimizer, range(2, 4))
    return values(model)


def sharpness_aware_minimization(make: Make) -> list[Tensor]:
    model = net()
    optimizer = make(model.parameters())
    for step in range(3):
        loss_of(model, step).backward()
        moves = [each.grad * 0.05 for each in model.parameters() if each.grad is not None]
        for sign in (1.0, -1.0):
            with torch.no_grad():
                for parameter, move in zip(model.parameters(), moves, strict=True):
                    parameter.add_(move, alpha=sign)
            if sign > 0:
                optimizer.zero_grad()
                loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


PROGRAMS = [
    averaged_weights,
    evaluated_on_an_average,
    scaled_losses_one_of_them_infinite,
    functional_gradients,
    normalized_weights,
    a_merged_adapter,
    a_search_for_a_learning_rate,
    sharpness_aware_minimization,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize(("name", "options"), [("AdamW", {"lr": 1e-2}), ("SGD", {"lr": 1e-2, "momentum": 0.9})])
def test_the_same_weights(program: Callable[[Make], list[Tensor]], name: str, options: dict[str, Any]) -> None:
    expected = program(lambda params: getattr(torch.optim, name)(params, fused=True, **options))
    found = program(lambda params: getattr(longshore, name)(params, **options))
    assert len(found) == len(expected)
    assert [torch.equal(*pair) for pair in zip(found, expected, strict=True)] == [True] * len(expected)

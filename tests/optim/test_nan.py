"""Gradients with NaN of any payload and sign leave one NaN in parameters and states, in every mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import simulated
from torch import Tensor, nn

import longshore

CANONICAL = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
OPTIMIZERS = {
    "AdamW": (longshore.AdamW, {"lr": 1e-2}),
    "Lion": (longshore.Lion, {"lr": 1e-3}),
    "Adagrad": (longshore.Adagrad, {"lr": 1e-2}),
    "SGD": (longshore.SGD, {"lr": 1e-2}),
    "momentum": (longshore.SGD, {"lr": 1e-2, "momentum": 0.9}),
}


def awkward_gradient(numel: int, dtype: torch.dtype) -> Tensor:
    """A NaN in every fifth element, of either sign and of payloads that differ, and infinity beside it."""
    integer, exponent, sign = {
        torch.float32: (torch.int32, 0x7F800000, 1 << 31),
        torch.bfloat16: (torch.int16, 0x7F80, 1 << 15),
        torch.float16: (torch.int16, 0x7C00, 1 << 15),
    }[dtype]
    gradient = torch.linspace(-1.0, 1.0, numel).to(dtype)
    bits = gradient.view(integer)
    for place, at in enumerate(range(0, numel, 5)):
        bits[at] = (exponent | 1 + place % 100) - (sign if place % 2 else 0)
    gradient[1::5] = torch.inf
    return gradient


def has_one_nan(values: Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32}[values.element_size()]
    nans = values.detach()[values.isnan()].view(integer)
    return bool((nans == CANONICAL[values.dtype]).all())


@pytest.mark.covering(2)
@pytest.mark.parametrize("mode", ["default", "simulated", "released"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_and_states_have_one_nan(name: str, dtype: torch.dtype, mode: str) -> None:
    kind, options = OPTIMIZERS[name]
    parameters = [nn.Parameter(torch.rand(numel).to(dtype)) for numel in (200, 7, 64)]
    more: dict[str, Any] = (
        {} if mode == "default" else {"offload": simulated(), "release_gradients": mode == "released"}
    )
    optimizer = kind(parameters, **options, **more)
    for step in range(3):
        for parameter in parameters:
            # Infinity minus infinity in the second step, in the moments and in what they make of the parameter.
            gradient = awkward_gradient(parameter.numel(), dtype) * (-1) ** step
            (parameter * gradient).sum().backward() if mode == "released" else setattr(parameter, "grad", gradient)
        optimizer.step()
        optimizer.zero_grad()
        for parameter in parameters:
            assert parameter.isnan().any() and has_one_nan(parameter)
            states = [each for each in optimizer.state[parameter].values() if isinstance(each, Tensor)]
            assert all(has_one_nan(each) for each in states if each.numel() == parameter.numel())

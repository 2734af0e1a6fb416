"""A forked process (a worker of a data loader) has no streamed parameters: whatever it does with one raises."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forks import in_child
from on_device import device_type
from torch import nn
from torch.utils.data import DataLoader, Dataset

import longshore

pytestmark = pytest.mark.gpu


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 2))


def trained(model: nn.Module) -> Any:
    optimizer = longshore.AdamW(model.parameters(), lr=0.1)
    for seed in range(2):
        torch.manual_seed(seed)
        model(torch.randn(4, 8).to(device_type())).square().mean().backward()
        optimizer.step()
    return optimizer


CALLS: dict[str, Callable[[nn.Module, nn.Parameter], object]] = {
    "a sum": lambda model, parameter: float(parameter.sum()),
    "a row": lambda model, parameter: parameter[0],
    "data": lambda model, parameter: parameter.data,
    "detach": lambda model, parameter: parameter.detach(),
    "numpy": lambda model, parameter: parameter.numpy(),
    "a list": lambda model, parameter: parameter.tolist(),
    "grad": lambda model, parameter: parameter.grad,
    "storage": lambda model, parameter: parameter.untyped_storage(),
    "a copy": lambda model, parameter: copy.deepcopy(parameter),
    "a pickle": lambda model, parameter: pickle.dumps(parameter),
    "a write": lambda model, parameter: parameter.data.fill_(0),
    "state_dict": lambda model, parameter: model.state_dict(),
    "a functional call": lambda model, parameter: nn.functional.linear(torch.ones(8), parameter),
    "a conversion": lambda model, parameter: model.half(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_touch_raises(call: str) -> None:
    model = network()
    longshore.stream(model, device_type(), blocks=["Sequential"])
    optimizer = trained(model)
    parameter = next(model.parameters())
    said = in_child(lambda: CALLS[call](model, parameter))
    assert said.startswith("LongshoreError: this process was forked"), said
    assert "give workers" in said
    assert in_child(lambda: [parameter.shape, parameter.dtype, sum(each.numel() for each in model.parameters())]) == (
        f"[{parameter.shape}, {parameter.dtype}, {sum(each.numel() for each in model.parameters())}]"
    )
    assert bool(parameter.detach().any())  # in the parent all is as before
    optimizer.close()


class Weights(Dataset[float]):
    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> float:
        return float(self.parameter.detach().sum())


def test_a_worker_of_a_data_loader_says_so() -> None:
    model = network()
    longshore.stream(model, device_type(), blocks=["Sequential"])
    trained(model)
    loader = DataLoader(Weights(next(model.parameters())), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match="this process was forked from the one that has the parameters"):
        list(loader)


@pytest.mark.parametrize("how", ["closed", "gone"])
def test_parameters_that_are_no_longer_streamed_are_ordinary(how: str) -> None:
    model = network()
    stream = longshore.stream(model, device_type(), blocks=["Sequential"])
    trained(model)
    parameters = list(model.parameters())
    expected = [each.detach().clone() for each in parameters]
    if how == "closed":
        stream.close()
    else:
        del stream, model
        gc.collect()
    assert in_child(lambda: [torch.equal(*pair) for pair in zip(parameters, expected, strict=True)]) == str(
        [True] * len(parameters)
    )

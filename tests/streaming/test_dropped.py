"""A forward that no backward follows is freed with what it returned, as in plain PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from freed import without_collector
from on_device import device_type
from torch import Tensor, nn

import longshore

pytestmark = pytest.mark.gpu

WIDTH = 64


@pytest.fixture(autouse=True)
def _without_the_collector() -> Iterator[None]:
    with without_collector():
        yield


class Block(nn.Module):
    """Functions that keep what they return (softmax, exp) and what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        x = self.inner(self.norm(x)).softmax(-1).exp()
        if fails:
            raise ValueError("a batch that cannot be used")
        return x


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, fails=fails and block is self.blocks[2])
        return x.sum()


def _dropped(model: nn.Module, x: Tensor) -> None:
    model(x)


def _fails(model: nn.Module, x: Tensor) -> None:
    with contextlib.suppress(ValueError):
        model(x, fails=True)


def _twice(model: nn.Module, x: Tensor) -> None:
    one, _ = model(x), model(x)
    one.backward()
    model.zero_grad()


@pytest.mark.parametrize("checkpoint", [False, True, "cpu"])
@pytest.mark.parametrize("what", [_dropped, _fails, _twice])
def test_nothing_stays_on_the_device(what: Callable[[nn.Module, Tensor], None], checkpoint: Any) -> None:
    model = Network()
    longshore.stream(model, device_type(), blocks=["Block"], checkpoint=checkpoint)
    x = torch.ones(128, WIDTH, device=device_type())
    held = []
    for _ in range(4):
        what(model, x)
        torch.accelerator.synchronize()  # copies under way hold their sources: it is the measurement that waits
        held.append(torch.get_device_module().memory_allocated())
    assert held[3] == held[1], held

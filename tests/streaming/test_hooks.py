"""Hooks of modules of a streamed model find what they find in plain PyTorch, or are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.modules.module as every_module
from on_device import device_type
from torch import Tensor, nn

import longshore
from longshore.errors import LongshoreError, ParameterError

pytestmark = pytest.mark.gpu

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.act = nn.GELU()
        self.codes = nn.Parameter(torch.arange(5, dtype=torch.uint8), requires_grad=False)
        self.wide = nn.Parameter(torch.ones(3, 2, dtype=torch.float64).t(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.inner(self.norm(x)))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def pair(checkpoint: Any = False) -> tuple[Any, Any]:
    plain = Network()
    model = copy.deepcopy(plain)
    longshore.stream(model, device_type(), checkpoint=checkpoint)
    return plain.to(device_type()), model


def batch() -> Tensor:
    return torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH).to(device_type())


PLACES: dict[str, Callable[[Network], nn.Module]] = {
    "block": lambda model: model.blocks[1],
    "in a block": lambda model: model.blocks[1].inner,
    "without parameters": lambda model: model.blocks[1].act,  # pyright: ignore
    "head": lambda model: model.head,
    "model": lambda model: model,
}


def _halve(module: nn.Module, *_: Any) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("place", PLACES)
def test_hooks_that_run_in_backward_are_refused_where_gradients_are_not_there_yet(place: str, kind: str) -> None:
    _, model = pair()
    handle = getattr(PLACES[place](model), kind)(_halve)
    words = "full backward hook, or one before its backward, which would not find the gradients"
    with pytest.raises(LongshoreError, match=words):
        model(batch())
    with torch.no_grad():
        model(batch())  # nothing goes backward
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model(batch().requires_grad_()).sum().backward()  # nothing has a gradient
    model.head.weight.requires_grad_()
    handle.remove()
    model(batch()).sum().backward()
    assert model.head.weight.grad is not None


def test_hooks_of_all_modules_that_run_in_backward_are_refused() -> None:
    _, model = pair()
    handle = every_module.register_module_full_backward_hook(_halve)
    try:
        with pytest.raises(LongshoreError, match="full backward hook"):
            model(batch())
    finally:
        handle.remove()


def _clamp(module: Any, *_: Any) -> None:
    module.weight.data.clamp_(-0.1, 0.1)


def _one_code(module: Any, *_: Any) -> None:
    module.codes.data[4] = 7


def _one_wide(module: Any, *_: Any) -> None:
    module.wide.data[1, 2] += 1e-13


INNER = {name: PLACES[name] for name in ("in a block", "head")}


@pytest.mark.covering(2)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", ["register_forward_pre_hook", "register_forward_hook"])
@pytest.mark.parametrize("place", INNER)
def test_a_hook_inside_a_block_that_writes_unseen_is_refused(place: str, kind: str, grad: bool) -> None:
    _, model = pair()
    getattr(INNER[place](model), kind)(_clamp)
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(ParameterError, match=r"weight was written to in a hook of a module inside"),
    ):
        model(batch())


@pytest.mark.parametrize("write, name", [(_one_code, "codes"), (_one_wide, "wide")])
def test_one_element_of_any_dtype(write: Callable[..., None], name: str) -> None:
    _, model = pair()
    block: Any = model.blocks[0]
    block.act.register_forward_pre_hook(lambda *_: write(block))
    with pytest.raises(ParameterError, match=rf"blocks\.0\.{name} was written"):
        model(batch())


@pytest.fixture
def _of_all_modules() -> Iterator[None]:
    handles = [every_module.register_module_forward_pre_hook(lambda *_: None)]
    yield
    for handle in handles:
        handle.remove()


@pytest.mark.usefixtures("_of_all_modules")
@pytest.mark.parametrize("checkpoint", [False, True, "cpu"])
def test_hooks_that_only_look_change_nothing(checkpoint: Any) -> None:
    plain, model = pair(checkpoint)
    seen: list[list[Tensor]] = []
    for each in (plain, model):
        seen.append(here := [])
        each.blocks[1].inner.register_forward_hook(lambda _, __, out, here=here: here.append(out.detach().clone()))
        each.head.register_forward_pre_hook(lambda module, _, here=here: here.append(module.weight.detach().clone()))
        each(batch()).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=False)) and len(seen[0]) == 2
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad.cpu())

"""Whoever writes to a parameter after a streamed model was called, the step included, writes after the copies of it.

Nothing here waits for the device: a program that trains does not. Copies and kernels are late by up to three
milliseconds on the simulated accelerator; another device is late by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from on_device import device_type
from streaming.test_chaos import delays
from torch import Tensor, nn

import longshore

pytestmark = pytest.mark.gpu

WIDTH = 16
DELAYS = [(0, 3000), (3000, 0)]
"""Of kernels, and of copies, in microseconds."""


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    delays(0, 0, 0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).sin()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), Block())


def pair(checkpoint: Any = False) -> tuple[nn.Module, nn.Module]:
    """A model on the device, and the same one streamed."""
    plain = network()
    model = copy.deepcopy(plain)
    longshore.stream(model, device_type(), blocks=["Block"], checkpoint=checkpoint)
    return plain.to(device_type()), model


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH).to(device_type())


def _multiply(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: torch.zeros(value.shape) for name, value in model.state_dict().items()})


def _unseen(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.zero_()


def _give(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)


WRITES: dict[str, Callable[[nn.Module], None]] = {
    "in place": _multiply,
    "load_state_dict": _load,
    "unseen": _unseen,
    "other memory": _give,
}


@pytest.mark.quick(1)
@pytest.mark.covering(2)
@pytest.mark.parametrize("kernel_us, copy_us", DELAYS)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("how", WRITES)
def test_a_write_after_forward_is_not_in_what_forward_returned(
    how: str, grad: bool, kernel_us: int, copy_us: int
) -> None:
    for seed in range(2):
        plain, model = pair()
        x = inputs()
        delays(seed, kernel_us, copy_us)
        found = []
        for each in (plain, model):
            with torch.set_grad_enabled(grad):
                out = each(x)
            WRITES[how](each)
            found.append(out.detach().cpu())
        delays(0, 0, 0)
        assert torch.equal(*found)


def _frozen_at_the_beginning(model: nn.Module) -> None:
    """No gradient of a parameter comes after backward has used the first block: its copy is the last one."""
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index >= 6)


@pytest.mark.quick(1)
@pytest.mark.covering(2)
@pytest.mark.parametrize("kernel_us, copy_us", DELAYS)
@pytest.mark.parametrize("checkpoint", [False, True, "cpu"])
@pytest.mark.parametrize("how", WRITES)
def test_a_write_after_backward_is_not_in_gradients(how: str, checkpoint: Any, kernel_us: int, copy_us: int) -> None:
    for seed in range(2):
        found = []
        models = pair(checkpoint)
        for each in models:
            _frozen_at_the_beginning(each)
        delays(seed, kernel_us, copy_us)
        for each in models:
            x = inputs().requires_grad_()
            each(x).square().sum().backward()
            WRITES[how](each)
            assert x.grad is not None
            found.append(x.grad.cpu())
        delays(0, 0, 0)
        assert torch.equal(*found)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: longshore.AdamW(parameters, lr=0.3),
    "AdamW, released": lambda parameters: longshore.AdamW(parameters, lr=0.3, release_gradients=True),
    "AdamW, ahead": lambda parameters: longshore.AdamW(
        parameters, lr=0.3, release_gradients=True, offload=longshore.Offload(30, speculation_memory="100%")
    ),
    "SGD": lambda parameters: longshore.SGD(parameters, lr=0.3),
    "torch's SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.3, foreach=False),
    "torch's SGD, foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.3, foreach=True),
}


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, between: str) -> list[Tensor]:
    x = inputs()
    target = torch.zeros_like(x)
    for _ in range(4):
        (model(x) - target).square().mean().backward()
        with torch.set_grad_enabled(between == "a forward"):
            target = model(x * 0.5).detach()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach().cpu() for each in model.parameters()]


@pytest.mark.quick(1)
@pytest.mark.covering(2)
@pytest.mark.parametrize("kernel_us, copy_us", DELAYS)
@pytest.mark.parametrize("between", ["a forward", "a forward without gradients"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_target_that_is_computed_between_backward_and_step(
    kind: str, between: str, kernel_us: int, copy_us: int
) -> None:
    for seed in range(2):
        plain, model = pair()
        optimizers = [OPTIMIZERS[kind](each.parameters()) for each in (plain, model)]
        want = _trained(plain, optimizers[0], between)
        delays(seed, kernel_us, copy_us)
        have = _trained(model, optimizers[1], between)
        delays(0, 0, 0)
        assert all(map(torch.equal, have, want))


@pytest.mark.quick(1)
@pytest.mark.covering(2)
@pytest.mark.parametrize("kernel_us, copy_us", DELAYS)
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("kind", ["AdamW", "torch's SGD", "torch's SGD, foreach"])
def test_a_grad_scaler_unscales_on_the_host(kind: str, clips: bool, kernel_us: int, copy_us: int) -> None:
    """1 / scale is on its way to the host when unscale_() returns to Python; one loss is not finite."""
    found = []
    for each, late in zip(pair(), [(0, 0), (kernel_us, copy_us)], strict=True):
        optimizer = OPTIMIZERS[kind](each.parameters())
        scaler = torch.amp.GradScaler(device_type(), init_scale=1024.0, growth_interval=2)
        delays(0, *late)
        for step in range(5):
            loss = each(inputs()).square().mean() * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_value_(each.parameters(), 1e-3)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        delays(0, 0, 0)
        found.append(([value.detach().cpu() for value in each.parameters()], scaler.get_scale()))
    assert found[0][1] == found[1][1]
    assert all(map(torch.equal, found[0][0], found[1][0]))

"""A graph of the device that is being captured is refused by name, and nothing is lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from streaming.test_chaos import delays
from torch import nn

import longshore
from simulated_device import device_module

pytestmark = pytest.mark.simulated

REFUSED = "a graph of the device is being captured, .* call backward\\(\\) and step\\(\\) outside of the graph"


def made(released: bool) -> tuple[nn.Module, longshore.AdamW]:
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to("sim")
    return model, longshore.AdamW(model.parameters(), release_gradients=released)


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 8, device="sim")).pow(2).mean().backward()


def weights_after(released: bool, monkeypatch: pytest.MonkeyPatch, refused: str) -> list[torch.Tensor]:
    """After two steps, between which a backward, clipping or a step is captured and refused."""
    model, optimizer = made(released)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    if refused != "backward":
        backward(model)
    with monkeypatch.context() as patched:
        patched.setattr(device_module, "capturing", bool(refused))
        if refused == "backward":
            backward(model)  # hooks do not raise into autograd
        elif refused == "step":
            with pytest.raises(longshore.LongshoreError, match=REFUSED):
                optimizer.step()
        elif refused == "clip":
            with pytest.raises(longshore.LongshoreError, match=REFUSED):
                optimizer.clip_grad_norm_(1e-3)
    if refused == "backward":
        with pytest.raises(longshore.GradientError, match=f"was not taken during backward: {REFUSED}"):
            optimizer.step()
        optimizer.zero_grad()
        backward(model)
    optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "released, refused", [(True, "backward"), (True, "step"), (True, "clip"), (False, "step"), (False, "clip")]
)
def test_a_capture_is_refused_and_training_goes_on(
    released: bool, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = weights_after(released, monkeypatch, "")
    for ours, theirs in zip(weights_after(released, monkeypatch, refused), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_backward_that_leaves_gradients_on_the_device_may_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    models = []
    for capturing in (True, False):
        model, optimizer = made(False)
        with monkeypatch.context() as patched:
            patched.setattr(device_module, "capturing", capturing)
            backward(model)
        optimizer.step()
        models.append(model)
    captured, usual = ([parameter.detach().cpu() for parameter in model.parameters()] for model in models)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(captured, usual, strict=True))


class Replayed(torch.autograd.Function):
    """A product whose backward writes the gradient to memory that the next one writes again, as a graph's does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, memory)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, memory = ctx.saved_tensors
        return None, torch.mm(x.t(), gradients[0], out=memory).detach(), None


def accumulated(device: str) -> list[torch.Tensor]:
    """Return weights after steps of three backwards each, which torch adds outside of ``.grad`` on the CPU."""
    torch.manual_seed(1)
    weights = [nn.Parameter(torch.randn(32, 32).to(device)) for _ in range(4)]
    memory = [torch.empty(32, 32, device=device) for _ in weights]
    ours = longshore.AdamW(weights, lr=0.01, release_gradients=device != "cpu")
    for _ in range(3):
        for _ in range(3):
            x = torch.randn(8, 32).to(device)
            for weight, place in zip(weights, memory, strict=True):
                before = None if device != "cpu" or weight.grad is None else weight.grad.clone()
                weight.grad = weight.grad if device != "cpu" else None
                Replayed.apply(x, weight, place).sum().backward()  # pyright: ignore
                if device == "cpu":
                    assert weight.grad is not None
                    weight.grad = weight.grad.clone() if before is None else before + weight.grad
        ours.step()
        ours.zero_grad()
    return [weight.detach().cpu() for weight in weights]


def test_gradients_in_memory_that_a_replay_writes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = accumulated("cpu")
    monkeypatch.setattr(device_module, "graph", SimpleNamespace(default_capture_stream=object()), raising=False)
    delays(3, 0, 3000)
    try:
        for ours, theirs in zip(accumulated("sim"), expected, strict=True):
            assert torch.equal(ours, theirs)
    finally:
        delays(0, 0, 0)

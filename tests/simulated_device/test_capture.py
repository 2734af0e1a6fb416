"""A graph of the device that is being captured is refused by name, and nothing is lost."""

from __future__ import annotations

import pytest
import torch
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
    model, optimizer = made(False)
    with monkeypatch.context() as patched:
        patched.setattr(device_module, "capturing", True)
        backward(model)
    optimizer.step()

"""Second derivatives with the one-line optimizer: plain torch's weights, or an error, and never silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import PlainLoop, batch, loss_of, small_model
from torch import Tensor

import longshore
from longshore.errors import LongshoreError

pytestmark = pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")


def once(model: Any, step: int) -> None:
    loss_of(model, step).backward(create_graph=True)


def twice(model: Any, step: int) -> None:
    loss_of(model, step).backward(create_graph=True)
    loss_of(model, step + 100).backward(create_graph=True)


def then_without(model: Any, step: int) -> None:
    loss_of(model, step).backward(create_graph=True)
    loss_of(model, step + 100).backward()


def penalty_on_inputs(model: Any, step: int) -> None:
    x = batch(step).requires_grad_()
    model(x).pow(2).sum().backward(create_graph=True)
    assert x.grad is not None
    x.grad.pow(2).sum().backward()


def penalty_on_gradients(model: Any, step: int) -> None:
    loss = loss_of(model, step)
    found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + torch.stack([gradient.pow(2).sum() for gradient in found]).sum()).backward()


def penalty_on_grad(model: Any, step: int) -> None:
    """On ``.grad`` itself."""
    loss_of(model, step).backward(create_graph=True)
    total: Tensor = torch.stack([parameter.grad.pow(2).sum() for parameter in model.parameters()]).sum()
    total.backward()


LOOPS = [once, twice, then_without, penalty_on_inputs, penalty_on_gradients, penalty_on_grad]


@pytest.mark.covering(2)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize("clip", [None, 0.01])
def test_trains_like_plain_torch(
    loop: Callable[[Any, int], None], release: bool, simulated: bool, clip: float | None
) -> None:
    twin, model = small_model(), small_model()
    plain = PlainLoop(twin.parameters(), lr=1e-2)
    transfer = longshore.SimulatedTransfer(seed=3) if simulated else None
    optimizer = longshore.AdamW(
        model.parameters(), lr=1e-2, release_gradients=release, offload=longshore.Offload(50, 1, transfer=transfer)
    )
    try:
        for step in range(3):
            if release and loop is penalty_on_grad:
                with pytest.raises(LongshoreError, match="its gradient is on the host"):
                    loop(model, step)
                optimizer.zero_grad()
                continue
            loop(twin, step)
            loop(model, step)
            coefficient = 1.0
            if clip is not None:
                norm = optimizer.clip_grad_norm_(clip)
                coefficient = float(torch.clamp(clip / (norm + 1e-6), max=1.0))
                assert coefficient < 1.0
            optimizer.step()
            optimizer.zero_grad()
            gradients = [parameter.grad.detach() for parameter in twin.parameters() if parameter.grad is not None]
            plain.step(gradients, coefficient)
            for parameter in twin.parameters():
                parameter.grad = None
            for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                assert torch.equal(ours, theirs)
    finally:
        optimizer.close()

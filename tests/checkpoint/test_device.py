"""Checkpoints of CUDA parameters: what is loaded elsewhere is what was there, and training was not disturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from on_device import NONE, device_type
from support import batch, small_model
from torch import Tensor

import longshore
from checkpoint.async_cases import slow_writer

pytestmark = pytest.mark.gpu


def make(device: str, place: str, tile_numel: int = 64, **options: Any) -> tuple[Any, Any]:
    model = small_model(torch.bfloat16).to(place)
    offload = longshore.Offload(tile_numel, device=device, **options)
    return model, longshore.AdamW(model.parameters(), lr=3e-2, release_gradients=True, offload=offload)


def train(model: Any, optimizer: Any, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        place = next(model.parameters()).device
        model(batch(step, torch.bfloat16).to(place)).float().pow(2).sum().backward()
        optimizer.step()


def state_of(model: Any, optimizer: Any) -> list[Tensor]:
    parameters = list(model.parameters())
    states = [value.cpu().clone() for parameter in parameters for value in optimizer.state[parameter].values()]
    return [*(parameter.detach().cpu().clone() for parameter in parameters), *states]


@pytest.mark.medium
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("device", ["cpu", NONE])
def test_training_goes_on(device: str, ahead: bool, tmp_path: Path, triton_on_the_device: bool) -> None:
    options: dict[str, Any] = {"speculation_memory": "100%"} if ahead and device == "cpu" else {}
    ends = []
    for disturbed in (False, True):
        model, optimizer = make(device, device_type(), **options)
        train(model, optimizer, 0, 3)
        if disturbed:
            with slow_writer() as writer:
                longshore.save(tmp_path, model, optimizer, async_save=True)
                saved = state_of(model, optimizer)
                train(model, optimizer, 3, 2)
                writer.go_on.set()
                longshore.wait_for_checkpoint()
            train(model, optimizer, 5, 2)
            others = [(device_type(), "none")] if triton_on_the_device else []
            for place, other_device in (*others, (device_type(), "cpu"), ("cpu", "cpu")):
                other, its = make(other_device, place, tile_numel=48)
                longshore.load(tmp_path, other, its)
                assert all(torch.equal(*pair) for pair in zip(state_of(other, its), saved, strict=True))
                its.close()
        else:
            train(model, optimizer, 3, 4)
        ends.append(state_of(model, optimizer))
        optimizer.close()
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))

"""NVIDIA-NeMo/RL issue 1869: a framework moved the optimizer's states to the CPU between two steps, did not bring them
back after writing a checkpoint, and ``step()`` ended in an error about two devices.

Here the states are on the host to begin with. The loop that moves them assigns equal tensors, which are the state from
then on, whether they are brought back or not, and what they replaced may be overwritten.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import PlainLoop, loss_of, same_weights, simulated, twins
from torch import Tensor

import longshore


def moved(optimizer: torch.optim.Optimizer) -> int:
    """Move every state as frameworks do, and overwrite the former memory."""
    tensors = 0
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                state[key] = value.to("cpu", copy=True)
                value.fill_(float("nan"))
                tensors += 1
    return tensors


@pytest.mark.quick(0)
@pytest.mark.covering(2)
@pytest.mark.parametrize("brought_back", [False, True])
@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_states_that_were_moved_between_steps(dtype: torch.dtype, release: bool, brought_back: bool) -> None:
    plain_model, model = twins(dtype)
    plain = PlainLoop(plain_model.parameters(), lr=1e-2)
    options: dict[str, Any] = {"lr": 1e-2, "release_gradients": release, "offload": simulated()}
    optimizer = longshore.AdamW(model.parameters(), **options)
    for step in range(4):
        for each in (plain_model, model):
            loss_of(each, step, dtype).backward()
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(plain_model, model), step
        assert moved(optimizer) >= 3 * 6, "step count and both moments of six parameters"
        exported = copy.deepcopy(optimizer.state_dict())
        if brought_back:
            moved(optimizer)
        assert all(torch.isfinite(value).all() for state in exported["state"].values() for value in state.values())

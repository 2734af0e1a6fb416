"""pytorch/pytorch issue 43706: ``Optimizer.load_state_dict`` casts every state to the parameter's
dtype, so that a resumed low-precision run goes on with rounded moments."""

from __future__ import annotations

import torch
from support import loss_of, small_model

import longshore


def test_moments_and_masters_keep_their_float32_digits() -> None:
    model = small_model(torch.bfloat16)
    optimizer = longshore.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        loss_of(model, step, torch.bfloat16).backward()
        optimizer.step()
        optimizer.zero_grad()
    resumed = longshore.AdamW(model.parameters())
    resumed.load_state_dict(optimizer.state_dict())
    for parameter in model.parameters():
        for key in ("exp_avg", "exp_avg_sq", "master"):
            before, after = optimizer.state[parameter][key], resumed.state[parameter][key]
            assert after.dtype == torch.float32 and torch.equal(before, after)
            assert not torch.equal(before, before.bfloat16().float())  # there was something to lose

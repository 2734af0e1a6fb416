"""deepspeedai/DeepSpeed pull request 8471: one step counter served all parameters of a dtype, so a
parameter that had been idle, or a group of two dtypes, got the bias correction of another."""

from __future__ import annotations

import pytest
import torch
from support import PlainLoop
from torch import nn

import longshore


@pytest.mark.parametrize("release", [False, True])
def test_step_counts_are_per_parameter(release: bool) -> None:
    def parameters() -> list[nn.Parameter]:
        torch.manual_seed(1)
        return [nn.Parameter(torch.randn(40).to(dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float32)]

    theirs, ours = parameters(), parameters()
    plain = PlainLoop(theirs, lr=1e-2)
    optimizer = longshore.AdamW(ours, lr=1e-2, release_gradients=release)
    active = [{0, 1, 2}, {0}, {0, 1}, {2}, {0, 1, 2}]
    for indices in active:
        for each in (theirs, ours):
            torch.stack([each[index].float().pow(3).sum() for index in sorted(indices)]).sum().backward()
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert all(torch.equal(one, other) for one, other in zip(theirs, ours, strict=True))
    assert [float(optimizer.state[parameter]["step"]) for parameter in ours] == [4, 3, 3]

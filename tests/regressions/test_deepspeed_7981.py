"""deepspeedai/DeepSpeed pull request 7981: with the optimizer offloaded, several backwards before a
step kept the last gradient only, because accumulation was gated by a configured number of steps."""

from __future__ import annotations

import pytest
from support import PlainLoop, loss_of, same_weights, simulated, twins

import longshore


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("backwards", [1, 2, 4])
def test_every_backward_of_a_window_counts(backwards: int, release: bool) -> None:
    plain_model, model = twins()
    plain = PlainLoop(plain_model.parameters(), lr=1e-3)
    optimizer = longshore.AdamW(model.parameters(), lr=1e-3, release_gradients=release, offload=simulated())
    for step in range(4):
        for part in range(backwards):
            for each in (plain_model, model):
                loss_of(each, 10 * step + part).backward()
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(plain_model, model)

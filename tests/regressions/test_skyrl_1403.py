"""NovaSky-AI/SkyRL pull request 1403: with the optimizer on the CPU, a resumed run kept the step count from before
loading, so that Adam corrected for another number of steps than its moments had seen.

Here the count is part of each parameter's state: it comes with the moments, whatever the optimizer had counted.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from support import PlainLoop, loss_of, same_weights, simulated, small_model

import longshore


@pytest.mark.quick(0)
@pytest.mark.parametrize("saved", ["state_dict", "checkpoint"])
@pytest.mark.parametrize("stale", [0, 5])
def test_the_loaded_step_count_is_the_one_that_counts(stale: int, saved: str, tmp_path: Path) -> None:
    plain_model, first, resumed = small_model(), small_model(), small_model(seed=1)
    plain = PlainLoop(plain_model.parameters(), lr=1e-2)
    before = longshore.AdamW(first.parameters(), lr=1e-2, offload=simulated())
    after = longshore.AdamW(resumed.parameters(), lr=1e-2, offload=simulated())
    for step in range(stale):
        loss_of(resumed, step).backward()
        after.step()
        after.zero_grad()
    model, optimizer = first, before
    for step in range(5):
        if step == 2:
            model, optimizer = resumed, after
            if saved == "checkpoint":
                longshore.save(tmp_path, first, before)
                longshore.load(tmp_path, resumed, after)
            else:
                resumed.load_state_dict(first.state_dict())
                after.load_state_dict(copy.deepcopy(before.state_dict()))
            assert {float(after.state[each]["step"]) for each in resumed.parameters()} == {2.0}
        for each in (plain_model, model):
            loss_of(each, step).backward()
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(plain_model, model), step
    assert all(torch.equal(after.state[p]["step"], torch.tensor(5.0)) for p in resumed.parameters())

"""What a strategy of Lightning does with a model that is only evaluated, and that no device has room for."""

from __future__ import annotations

import copy

import pytest
import torch
from on_device import device_type
from torch import nn

import longshore
from longshore.integrations.lightning.models import place

pytestmark = pytest.mark.gpu


def test_a_model_that_is_only_evaluated_is_streamed_too() -> None:
    device = torch.device(device_type(), 0)
    model = nn.Sequential(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), nn.Linear(8, 3))
    plain = copy.deepcopy(model).to(device)
    config = longshore.Config(
        stage=3, offload_device="cpu", param_device="cpu", optimizer={"type": "AdamW", "lr": 1e-3}
    )
    made = place(model, config, {"weights": None, "wrap_policy": None}, device)
    x = torch.ones(2, 8, device=device)
    with torch.no_grad():
        assert torch.equal(made(x).cpu(), plain(x).cpu())
    assert {each.device.type for each in model.parameters()} == {"cpu"}
    made.close_streaming()
    engine = longshore.initialize(model=model, config=config).engine
    engine.backward(engine(x).sum())
    engine.step()
    engine.destroy()

"""The setting ``accumulate`` of an engine, in its file and in its configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import longshore
from longshore import ConfigError
from longshore.engine.config import load_config


def file(device: str = "cpu", **own: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": device}},
        "longshore": own,
    }


def trained(monkeypatch: pytest.MonkeyPatch, value: str) -> tuple[list[torch.Tensor], list[int]]:
    """Return weights after two steps, and how many bytes each backward of the second one copied."""
    transfer = longshore.SimulatedTransfer()
    copied = [0]
    copy = transfer.down.copy

    def counted(source: Any, *arguments: Any) -> Any:
        copied[-1] += source.nbytes
        return copy(source, *arguments)

    monkeypatch.setattr("longshore.optim.offload.streams_for", lambda device: transfer)
    monkeypatch.setattr(transfer.down, "copy", counted)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 50), nn.ReLU(), nn.Linear(50, 20))
    engine = longshore.initialize(model=model, config=file(accumulate=value)).engine
    for number in range(6):
        if number == 3:
            copied.clear()
        copied.append(0)
        engine.backward(engine(torch.ones(4, 40, dtype=torch.bfloat16) * (1 + number)).float().pow(2).mean())
        engine.step()
    engine.destroy()
    return [parameter.detach().clone() for parameter in model.parameters()], copied


def test_the_setting_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    numel = 40 * 50 + 50 + 50 * 20 + 20
    weights = {}
    for value in ("device", "host", "auto"):  # on the CPU "auto" is "host"
        weights[value], copied = trained(monkeypatch, value)
        assert copied == [0, 0, 4 * numel] if value == "device" else sum(copied) == 3 * 2 * numel, value
    for value in ("host", "auto"):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights["device"], weights[value], strict=True))


@pytest.mark.parametrize("value", ["gpu", 1])
def test_wrong_values(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"longshore\.accumulate = .*must be one of \"auto\", \"device\", \"host\""):
        load_config(file(accumulate=value))


def test_it_needs_the_state_on_the_host() -> None:
    with pytest.raises(ConfigError, match="accumulate is where gradients on their way to the host are added"):
        load_config(file("none", accumulate="device"))


def test_optimizers_that_take_no_gradients_in_backward_refuse_it() -> None:
    parameters = [nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match="accumulate='device' is for gradients that are taken in backward"):
        longshore.AdamW(parameters, offload=longshore.Offload(accumulate="device"))
    with pytest.raises(ValueError, match="accumulate='host' is for gradients on their way to the host"):
        longshore.Offload(device="none", accumulate="host")


@pytest.mark.parametrize(
    "value, said",
    [
        ("device", "several gradients of one step are added on the device"),
        ("host", "several gradients of one step are added on the host"),
        ("auto", "several gradients of one step are added on the host"),  # without a device
    ],
)
def test_explain_says_where(
    value: Any, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longshore.optim.offload.streams_for", lambda device: longshore.SimulatedTransfer())
    engine = longshore.initialize(model=nn.Linear(4, 4), config=file(accumulate=value)).engine
    engine.explain()
    assert said in capsys.readouterr().out.splitlines()
    engine.destroy()

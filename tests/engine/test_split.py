"""``offload_optimizer.ratio``: the weights are in test_table.py."""

from __future__ import annotations

from typing import Any

import pytest
from support import loss_of

import longshore
from engine.files import assert_same, file, started, train
from longshore.engine import ConfigError
from longshore.engine.config import load_config


def offloaded(**keys: Any) -> dict[str, Any]:
    return {"stage": 2, "offload_optimizer": {"device": "cpu", **keys}}


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_ratio(ratio: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The share of the state that is on the host; the same weights."""
    monkeypatch.setattr(
        "longshore.optim.offload.streams_for", lambda device: longshore.SimulatedTransfer(seed=1, max_delay_s=0.001)
    )
    models, sizes = [], []
    for content in (file(), file(zero_optimization=offloaded(ratio=ratio, super_offload=True))):
        with started(content) as engine:
            for step in range(4):
                train(engine, [loss_of(engine, step)])
            explanation = engine.explain()
            sizes.append((explanation.host_bytes["state"], explanation.device_bytes.get("state", 0)))
            models.append(engine.module)
    assert_same(*models)
    (whole, none), (host, device) = sizes
    assert none == 0 and whole > 0
    whole = whole * 12 // 8  # parameters in host memory are their own masters, and those on a device have others
    numels = [parameter.numel() for parameter in models[0].parameters()]
    allowed = max(numels) * 12 + 16 * 12 * len(numels)  # no parameter here is cut
    assert abs(host - ratio * whole) <= allowed and abs(device - (1 - ratio) * whole) <= allowed
    share = explanation.offloaded_share
    assert abs(share - host / (host + device)) <= 16 * len(numels) / sum(numels)  # buffers are padded
    said = f"{share:.0%} of optimizer state on the host (ratio {ratio:g}), the rest on the device"
    assert (said in capsys.readouterr().out) == (ratio < 1.0)


def test_with_the_model_in_host_memory_nothing_is_split(capsys: pytest.CaptureFixture[str]) -> None:
    with started(file(zero_optimization=offloaded(ratio=0.4))) as engine:
        train(engine, [loss_of(engine, 0)])
        explanation = engine.explain()
    assert explanation.ratio == 1.0 and "state" not in explanation.device_bytes
    said = capsys.readouterr().out
    assert "optimizer state on the host" in said and "the rest on the device" not in said


def test_it_needs_some_state_on_the_host() -> None:
    with pytest.raises(ConfigError, match=r"ratio.* must agree with .*offload_optimizer\.device, which is none"):
        load_config(file(zero_optimization={"stage": 2, "offload_optimizer": {"ratio": 0.5}}))
    with pytest.raises(ConfigError, match=r"offload_ratio 0\.5 is the share .* offload_device is none; set it to cpu"):
        longshore.Config(train_batch_size=1, offload_ratio=0.5)
    assert load_config(file(zero_optimization={"stage": 2, "offload_optimizer": {"ratio": 1.0}})).config is not None


@pytest.mark.parametrize("ratio", [-0.1, 1.1, "half", True])
def test_wrong_values(ratio: Any) -> None:
    with pytest.raises(ConfigError, match=r"zero_optimization\.offload_optimizer\.ratio"):
        load_config(file(zero_optimization=offloaded(ratio=ratio)))

"""Names of DeepSpeed that transformers, Accelerate and TRL read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from longshore.compat.deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from longshore.compat.deepspeed.runtime.zero import partition_parameters
from torch import nn

import longshore
import longshore.compat.deepspeed as deepspeed
from longshore import LongshoreError

FILE = {
    "train_batch_size": 1,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 1, "sub_group_size": 7},
}


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def started(**more: Any) -> Any:
    return deepspeed.initialize(model=nn.Linear(4, 4), config={**FILE, **more})[0]


def test_the_configuration_is_the_mapping_that_was_given_and_the_settings() -> None:
    engine = started()
    assert engine.config.get("zero_optimization", {}) == FILE["zero_optimization"]
    assert engine.config["train_batch_size"] == 1 and "fp16" not in engine.config
    assert engine.config.get("fp16") is None and dict(engine.config) == FILE and len(engine.config) == len(FILE)
    assert [*engine.config] == [*engine.config.keys()] == [*FILE]
    assert [*engine.config.items()] == [*FILE.items()] and [*engine.config.values()] == [*FILE.values()]
    assert engine.config.stage == 1 and isinstance(engine.config, longshore.Config)
    engine.destroy()


@pytest.mark.parametrize(
    "key",
    [
        "stage3_gather_16bit_weights_on_model_save",
        "gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
    ],
)
def test_whether_weights_are_gathered_for_saving(key: str) -> None:
    old = key != "stage3_gather_16bit_weights_on_model_save"
    with pytest.warns(UserWarning, match="is an old name") if old else contextlib.nullcontext():
        engine = started(zero_optimization={"stage": 3, key: False})
    assert engine.zero_gather_16bit_weights_on_model_save() is False
    engine.destroy()
    engine = started(zero_optimization={"stage": 3})
    assert engine.zero_gather_16bit_weights_on_model_save() is True
    engine.destroy()


def test_clones_share_what_their_originals_share() -> None:
    weight = nn.Parameter(torch.ones(2))
    found = clone_tensors_for_torch_save({"a": weight, "b": [weight, (torch.zeros(1), "text")], "c": 3})
    assert found["a"] is found["b"][0] and found["a"] is not weight and not found["a"].requires_grad
    assert torch.equal(found["a"], weight) and found["b"][1] == (torch.zeros(1), "text") and found["c"] == 3
    found["a"].zero_()
    assert weight.sum() == 2


def test_constructors_take_a_dtype_and_leave_integers() -> None:
    made = partition_parameters.zero_wrapper_for_fp_tensor_constructor(torch.zeros, torch.bfloat16)
    assert made(2).dtype == torch.bfloat16 and made(2, dtype=torch.int64).dtype == torch.int64
    made = partition_parameters.zero_wrapper_for_fp_tensor_constructor(torch.arange, torch.float32, "meta")
    assert made(3).device.type == "meta" and made(3, device="cpu").device.type == "cpu"
    assert partition_parameters._orig_torch_arange is torch.arange


def test_an_engine_without_an_optimizer_evaluates() -> None:
    model = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    expected = model(x).detach()
    content = {"train_batch_size": 1, "scheduler": {"type": "WarmupLR", "params": {}}, "zero_optimization.stage": 3}
    engine, optimizer, _, scheduler = deepspeed.initialize(model=model, config=content)
    assert optimizer is None and scheduler is None and isinstance(engine, deepspeed.DeepSpeedEngine)
    with torch.no_grad():
        assert torch.equal(engine(x), expected)
    with pytest.raises(LongshoreError, match="without an optimizer"):
        engine.backward(engine(x).sum())
    with pytest.raises(LongshoreError, match="without an optimizer"):
        engine.step()
    engine.destroy()

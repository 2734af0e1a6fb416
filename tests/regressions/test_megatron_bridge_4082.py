"""NVIDIA-NeMo/Megatron-Bridge pull request 4082 (and NVIDIA/Megatron-LM pull request 5071): weights were loaded into a
bf16 model after its optimizer had been built, the float32 copies on the CPU kept their random values, and the next step
wrote those over the loaded weights. The loss looked plausible at the first step and collapsed at the second.

Here the next step starts from the loaded weights, whenever they are loaded.
"""

from __future__ import annotations

import pytest
import torch
from support import PlainLoop, loss_of, same_weights, simulated, small_model, twins

import longshore


@pytest.mark.covering(2)
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loaded_weights_are_those_that_are_stepped(dtype: torch.dtype, release: bool, before: int) -> None:
    plain_model, model = twins(dtype)
    plain = PlainLoop(plain_model.parameters(), lr=1e-2)
    optimizer = longshore.AdamW(model.parameters(), lr=1e-2, release_gradients=release, offload=simulated())
    for step in range(before + 3):
        if step == before:
            loaded = small_model(dtype, seed=5).state_dict()
            for each in (plain_model, model):
                each.load_state_dict(loaded)
            for index in range(len(plain.parameters)):
                plain.refresh(index)
        for each in (plain_model, model):
            loss_of(each, step, dtype).backward()
        plain.step_on_grads()
        optimizer.step()
        optimizer.zero_grad()
        assert same_weights(plain_model, model), step


@pytest.mark.parametrize("before", [0, 2])
def test_the_engine_steps_loaded_weights(before: int) -> None:
    plain_model, model = twins(torch.bfloat16)
    plain = PlainLoop(plain_model.parameters(), lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 5,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    engine = longshore.initialize(model=model, config=config)[0]
    try:
        for step in range(before + 3):
            if step == before:
                loaded = small_model(torch.bfloat16, seed=5).state_dict()
                for each in (plain_model, model):
                    each.load_state_dict(loaded)
                for index in range(len(plain.parameters)):
                    plain.refresh(index)
            loss_of(plain_model, step, torch.bfloat16).backward()
            plain.step_on_grads()
            engine.backward(loss_of(engine, step, torch.bfloat16))
            engine.step()
            assert same_weights(plain_model, model), step
    finally:
        engine.destroy()

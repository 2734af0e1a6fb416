"""Engines made from the content of a DeepSpeed file, and what plain PyTorch makes of the same window."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from support import PlainLoop, loss_of, small_model, whole
from torch import Tensor, nn

import longshore

OPTIONS: dict[str, Any] = {"lr": 2e-3, "weight_decay": 0.05}

USERS_BLOCK = """
{"train_batch_size": 1, "gradient_accumulation_steps": 1,
 "optimizer": {"type": "adamw", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}},
 "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true},
   "reduce_bucket_size": 50000000, "allgather_bucket_size": 50000000, "overlap_comm": true,
   "contiguous_gradients": false},
 "fp16": {"enabled": false}, "bf16": {"enabled": false},
 "activation_checkpointing": {"partition_activations": true, "contiguous_memory_optimization": true,
   "cpu_checkpointing": false, "synchronize_checkpoint_boundary": true, "number_checkpoints": 0, "profile": false}}
"""
"""A real user's file."""


def file(**keys: Any) -> dict[str, Any]:
    """A file's content of which nothing has to be said: no clipping, AdamW, tiles of which every model has several."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": dict(OPTIONS)},
        "longshore": {"tile_numel": 100, "threads": 1},
        **keys,
    }


def without(content: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key not in keys}


@contextlib.contextmanager
def started(config: Any, model: nn.Module | None = None, **arguments: Any) -> Iterator[Any]:
    """An engine, let go of at the end."""
    engine = longshore.initialize(model=model or small_model(), config=config, **arguments).engine
    try:
        yield engine
    finally:
        engine.destroy()


def train(engine: Any, losses: Iterable[Tensor]) -> None:
    """A backward and a ``step()`` for each loss."""
    for loss in losses:
        engine.backward(loss)
        engine.step()


def gradients_of(
    twin: nn.Module, losses: Sequence[Tensor], loss_scale: float = 1.0, divisor: int | None = None
) -> list[Tensor]:
    """What the window of these losses comes to, added in float32.

    ``divisor``: of each loss; None: how many there are.
    """
    divisor, totals = divisor or len(losses), []
    for loss in losses:
        if divisor > 1:
            loss = loss / divisor
        if loss_scale != 1.0:
            loss = loss.float() * loss_scale
        found = [gradient.float() for gradient in torch.autograd.grad(loss, list(twin.parameters()))]
        totals = [total + gradient for total, gradient in zip(totals, found, strict=True)] if totals else found
    return totals


def norm_of(gradients: Iterable[Tensor]) -> float:
    """In float64, rounded once to float32."""
    return float(torch.tensor(math.sqrt(sum(float(gradient.double().pow(2).sum()) for gradient in gradients))))


def assert_same(model: nn.Module, twin: nn.Module, when: object = "") -> None:
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(whole(ours), theirs), f"{name} differs, {when}"


def assert_trains_like(
    config: dict[str, Any],
    loop_of: Callable[[list[nn.Parameter]], PlainLoop],
    dtype: torch.dtype = torch.float32,
    steps: int = 3,
    **arguments: Any,
) -> None:
    """One rank, one backward a step: the engine's weights are the loop's, and they moved."""
    twin = small_model(dtype)
    loop = loop_of(list(twin.parameters()))
    with started(config, small_model(), **arguments) as engine:
        for step in range(steps):
            before = [parameter.detach().clone() for parameter in engine.module.parameters()]
            train(engine, [loss_of(engine, step, dtype)])
            loop.step(gradients_of(twin, [loss_of(twin, step, dtype)]))
            assert_same(engine.module, twin, f"step {step}")
            assert any(
                not torch.equal(old, new) for old, new in zip(before, engine.module.parameters(), strict=True)
            ), "nothing moved"

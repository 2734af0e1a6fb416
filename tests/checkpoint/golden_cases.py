"""Small trainings whose checkpoints of each released version are kept in ``golden``, and load for ever.

Gradients are numbers that are written here and no products: what follows a checkpoint is then the same bits on every
x86-64 machine and with every torch. On aarch64 torch.randn gives other last bits; tests/aarch64/bits.py brings these.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import longshore

GOLDEN = Path(__file__).parent / "golden"
STEPS, MORE = 3, 2

LOOPS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-2, "weight_decay": 0.1},
    "adam_fp32": {"lr": 1e-2},
    "lion": {"lr": 1e-3},
    "adagrad": {"lr": 1e-2},
    "sgd": {"lr": 1e-2, "momentum": 0.9},
    "adamw_bf16_states": {"lr": 1e-2},
    "adamw_8bit_states": {"lr": 1e-2},
    "muon": {"lr": 1e-2},
}
ENGINES: dict[str, dict[str, Any]] = {
    "engine_stage_0": {"stage": 0, "ranks": 1},
    "engine_stage_2_two_ranks": {"stage": 2, "ranks": 2},
    "engine_stage_3_two_ranks": {"stage": 3, "ranks": 2},
}
WITHOUT_MORE = ("muon",)
"""Newton-Schulz is of matrix products, whose bits belong to a kind of processor."""


class Numbers(nn.Module):
    """A loss of which the gradients are numbers of a seed. One parameter is frozen; ``large``: one is large enough for
    states of 8 bits."""

    def __init__(self, dtype: torch.dtype, large: bool = False) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        shapes = {"wide": (64, 64) if large else (8, 9), "narrow": (5, 7), "bias": (5,), "frozen": (3,)}
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=random).to(dtype)
            self.register_parameter(name, nn.Parameter(values, requires_grad=name != "frozen"))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, seed: int) -> Tensor:
        self.calls += 1
        random = torch.Generator().manual_seed(seed)
        losses = []
        for parameter in (self.wide, self.narrow, self.bias):
            factors = torch.randn(parameter.shape, generator=random).to(parameter.dtype)
            losses.append((parameter * factors).sum())
        return losses[0] + losses[1] + losses[2]


def loop_of(case: str) -> tuple[Numbers, Any]:
    """A model and its optimizer, both new."""
    kind, _, states = case.partition("_")
    model = Numbers(torch.float32 if states == "fp32" else torch.bfloat16, large=states == "8bit_states")
    options = LOOPS[case]
    if kind == "muon":
        return model, longshore.Muon(longshore.muon_groups(model, show=False), **options)
    format = {"bf16_states": "bf16", "8bit_states": "8bit"}.get(states, "fp32")
    made = {"adamw": longshore.AdamW, "adam": longshore.Adam, "lion": longshore.Lion}
    made |= {"adagrad": longshore.Adagrad, "sgd": longshore.SGD}
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    return model, made[kind](trained, offload=longshore.Offload(threads=1, states=format), **options)


def train_loop(model: nn.Module, optimizer: Any, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()


def found_in_loop(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Weights, buffers and states, by name."""
    found = {f"model.{name}": value.clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{key}.{name}"] = torch.as_tensor(value).clone()
    return found


def digests(found: dict[str, Tensor]) -> dict[str, list[Any]]:
    """Each tensor's dtype, shape, and the checksum of its bits."""
    return {
        name: [str(value.dtype), [*value.shape], hashlib.sha256(value.view(-1).view(torch.uint8).numpy()).hexdigest()]
        for name, value in found.items()
    }


@contextlib.contextmanager
def engine_of(case: str) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = longshore.initialize(
            model=Numbers(torch.bfloat16),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": ENGINES[case]["stage"], "offload_optimizer": {"device": "cpu"}},
            },
            offload=longshore.Offload(threads=1),
        ).engine
    try:
        yield engine
    finally:
        engine.destroy()


def train_engine(engine: Any, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        engine.backward(engine(step))
        engine.step()


def found_in_engine(engine: Any) -> dict[str, Tensor]:
    """Whole weights and states, on each rank."""
    found: dict[str, Tensor] = {"global_steps": torch.tensor(engine.global_steps)}
    for name, parameter in engine.module.named_parameters():
        value = longshore.utils.safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        if value is not None:
            found[f"master.{name}"] = value.clone()
            for key in ("exp_avg", "exp_avg_sq"):
                state = longshore.utils.safe_get_full_optimizer_state(parameter, key)
                assert state is not None
                found[f"{key}.{name}"] = state.clone()
    return found


def write_engine(case: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What is in its checkpoint, and what is there some steps later."""
    with engine_of(case) as engine:
        train_engine(engine, 0, STEPS)
        engine.save_checkpoint(folder)
        before = found_in_engine(engine)
        train_engine(engine, STEPS, MORE)
        return before, found_in_engine(engine)


def read_engine(case: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same after loading it into an engine that has trained otherwise."""
    with engine_of(case) as engine:
        train_engine(engine, 50, 1)
        engine.load_checkpoint(folder)
        before = found_in_engine(engine)
        train_engine(engine, STEPS, MORE)
        return before, found_in_engine(engine)

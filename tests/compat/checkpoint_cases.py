"""Engines for the models of DeepSpeed's checkpoints, on every rank."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import longshore
from compat.write_checkpoint_data import CASES, Model, config_of, groups_of

DATA = Path(__file__).parent / "checkpoint_data"
DTYPES = {None: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def engine_of(name: str, stage: int) -> Iterator[Any]:
    """Of other weights than the case's."""
    case = CASES[name]
    torch.manual_seed(5)
    model = Model().to(DTYPES[case.get("dtype")])
    config = {**config_of(case), "zero_optimization": {"stage": stage}}
    client = torch.optim.AdamW(groups_of(model), lr=1.0) if case.get("client") else None
    if client is None:
        config["optimizer"]["params"].pop("torch_adam", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what our engine says to DeepSpeed's configuration
        engine = longshore.initialize(
            model=model, optimizer=client, model_parameters=None if client else groups_of(model), config=config
        ).engine
    try:
        yield engine
    finally:
        engine.destroy()


def check_state(engine: Any, expected: dict[str, torch.Tensor]) -> None:
    step = int(expected["step"])
    for name, parameter in engine.module.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        assert torch.equal(whole, expected[f"{name} weight"]), name
        if not parameter.requires_grad:
            continue
        state = dict(engine.optimizer.state[parameter])
        if whole.dtype == torch.float32:
            assert torch.equal(whole, expected[f"{name} master"]), name
        if step == 0:
            assert not state
            continue
        assert state.pop("step") == step
        assert state.keys() == {"exp_avg", "exp_avg_sq", *(["master"] if whole.dtype != torch.float32 else [])}
        for key, value in state.items():
            found = value.full_tensor() if hasattr(value, "full_tensor") else value
            assert expected[f"{name} {key}"].abs().max() > 0
            assert torch.equal(found, expected[f"{name} {key}"]), (name, key)
    assert engine.module.calls == expected["calls"]
    assert engine.get_lr() == expected["lr"].tolist()
    assert engine.module.head.weight is engine.module.embedding.weight


def load_on_ranks(name: str, stage: int, folder: str) -> None:
    """One process imported it."""
    with engine_of(name, stage) as engine:
        first = dist.get_rank() == 0
        with pytest.warns(UserWarning, match="was saved by 1 ranks") if first else contextlib.nullcontext():
            engine.load_checkpoint(folder)
        check_state(engine, load_file(DATA / name / "expected.safetensors"))

"""Checkpoints that DeepSpeed wrote, met at every door: each says how to import them, and the import fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.deepspeed_cases import DATA, check_state
from checkpoint.write_deepspeed_data import CASES, Model, config_of, groups_of
from safetensors.torch import load_file
from torch import nn

import longshore
import longshore.compat.deepspeed as deepspeed
from longshore.checkpoint.deepspeed import import_deepspeed
from longshore.errors import CheckpointError

ADVICE = r"is DeepSpeed's; convert it once with `longshore import-deepspeed {root} --out FOLDER{tag}`"


def advice(root: Path, tag: str = "") -> str:
    return ADVICE.format(root=root, tag=tag)


def by_one_line(config: Any) -> tuple[Callable[..., Any], Callable[[], None]]:
    model = nn.Linear(2, 2)
    return lambda folder, **tag: longshore.load(folder, model, **tag), lambda: None


def by_engine(config: Any) -> tuple[Callable[..., Any], Callable[[], None]]:
    engine = longshore.initialize(model=nn.Linear(2, 2), config=config).engine
    return engine.load_checkpoint, engine.destroy


def by_deepspeed(config: Any) -> tuple[Callable[..., Any], Callable[[], None]]:
    engine = deepspeed.initialize(model=nn.Linear(2, 2), config=config)[0]
    return engine.load_checkpoint, engine.destroy


@pytest.mark.parametrize("door", [by_one_line, by_engine, by_deepspeed])
def test_the_door_says_how_to_import_it(door: Any, request: pytest.FixtureRequest) -> None:
    root = DATA / "stage1_fp32"
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "optimizer": {"type": "AdamW"}}
    load, close = door(config)
    request.addfinalizer(close)
    with pytest.raises(CheckpointError, match=advice(root)):
        load(root)
    tagged = advice(root, " --tag global_step3")
    with pytest.raises(CheckpointError, match=tagged):
        load(root, tag="global_step3")
    with pytest.raises(CheckpointError, match=tagged):
        load(root / "global_step3")


OPTIMIZERS = {
    "a file's Adam": ("Adam", {}),
    "a file's AdamW": ("AdamW", {}),
    "a file's Adam, not decoupled": ("Adam", {"adam_w_mode": False}),
}


def client_of(name: str, groups: Any) -> Any:
    kinds: dict[str, Any] = {
        "torch's AdamW": torch.optim.AdamW,
        "torch's Adam": torch.optim.Adam,
        "DeepSpeedCPUAdam": deepspeed.ops.adam.DeepSpeedCPUAdam,
        "FusedAdam": deepspeed.ops.adam.FusedAdam,
    }
    return kinds[name](groups, lr=1.0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "case, optimizer, fits",
    [
        ("stage2_bf16", "a file's Adam", True),
        ("stage2_bf16", "a file's AdamW", True),
        ("stage2_bf16", "a file's Adam, not decoupled", False),
        ("stage2_bf16", "torch's AdamW", True),
        ("stage2_bf16", "torch's Adam", False),
        ("stage2_bf16", "DeepSpeedCPUAdam", True),
        ("stage2_bf16", "FusedAdam", True),
        ("stage2_fp16", "a file's Adam, not decoupled", True),
        ("stage2_fp16", "a file's AdamW", False),
        ("stage2_fp16", "torch's Adam", True),
        ("stage2_fp16", "torch's AdamW", False),
    ],
)
def test_the_import_fits_the_optimizer(case: str, optimizer: str, fits: bool, tmp_path: Path) -> None:
    path = import_deepspeed(DATA / case, tmp_path)
    model = Model().to(torch.bfloat16 if CASES[case]["dtype"] == "bf16" else torch.float16)
    config = config_of(CASES[case])
    given: dict[str, Any] = {"model_parameters": groups_of(model)}
    if optimizer in OPTIMIZERS:
        kind, params = OPTIMIZERS[optimizer]
        config["optimizer"] = {"type": kind, "params": {"lr": 1.0, **params}}
    else:
        del config["optimizer"]
        given = {"optimizer": client_of(optimizer, groups_of(model))}
    config.pop("scheduler", None)
    engine = deepspeed.initialize(model=model, config=config, **given)[0]
    try:
        if fits:
            assert engine.load_checkpoint(tmp_path)[0] == path
            check_state(engine, load_file(DATA / case / "expected.safetensors"))
            assert engine.optimizer.param_groups[0]["lr"] != 1.0
        else:
            with pytest.raises(CheckpointError, match=r"decoupled|was saved from"):
                engine.load_checkpoint(tmp_path)
    finally:
        engine.destroy()

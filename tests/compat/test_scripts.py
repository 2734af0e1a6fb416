"""Unmodified DeepSpeed scripts give what the same training gives when it is written against longshore, or torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks

from compat import direct, plain
from compat.running import alone, run_or_raise

CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 4}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
SCRIPTS = ["finetune", "client_optimizer", "several_engines", "own_backward", "gan", "export"]


def ran(world_size: int, folder: Path, request: pytest.FixtureRequest, function: Any, *arguments: str) -> list[Any]:
    """What each rank saved."""
    name = function if isinstance(function, str) else f"{function.__name__}_direct"
    out = str(folder / name)
    given = ("--out", out, *arguments) if isinstance(function, str) else (out, *arguments)
    if world_size == 1:
        alone(folder, function, *given)
    else:
        ranks: Ranks = request.getfixturevalue("two_ranks")
        ranks(run_or_raise, function, *given)
    return [torch.load(f"{out}.{rank}") for rank in range(world_size)]


@pytest.mark.covering(1)
@pytest.mark.quick(0)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("script", SCRIPTS)
def test_equals_the_same_training_by_longshore_and_by_plain_pytorch(
    script: str, world_size: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    theirs = ("--deepspeed_config", str(path)) if script == "finetune" else ()
    ours = (str(path),) if script == "finetune" else ()
    found = ran(world_size, tmp_path, request, f"{script}.py", *theirs)
    expected = ran(world_size, tmp_path, request, getattr(direct, script), *ours)
    for one, other in zip(found, expected, strict=True):
        for key in other.keys() & one.keys():
            assert_same(one[key], other[key], key)
    oracle = getattr(plain, script)(world_size, *([CONFIG] if script == "finetune" else []))
    for rank, one in enumerate(found):
        if "weights" in one:
            assert_same(one["weights"], oracle["weights"], "weights")
        if "losses" in oracle:
            assert one["losses"] == oracle["losses"][rank]


def assert_same(found: Any, expected: Any, what: str) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), what
        for name in expected:
            assert torch.equal(found[name], expected[name]), f"{what}: {name}"
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), what
    else:
        assert found == expected, what

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import longshore


def test_the_arguments_of_scripts_reach_initialize(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 1, "gradient_clipping": 0.5, "optimizer": {"type": "AdamW"}}))
    parser = longshore.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    engine = longshore.initialize(args=args, model=nn.Linear(3, 2)).engine
    try:
        assert engine.gradient_clipping() == 0.5
        engine.backward(engine(torch.ones(1, 3)).sum())
        engine.step()
        assert engine.was_step_applied()
    finally:
        engine.destroy()


def test_one_rank_needs_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    longshore.init_distributed(dist_backend="gloo", distributed_port=29500)
    assert not dist.is_initialized()


def test_what_is_not_done_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="does not support init_method"):
        longshore.init_distributed(init_method="env://")

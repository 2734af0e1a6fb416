"""docs/checkpoint_format.md and docs/optimizer.md: save and load, with an engine and without."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import longshore
from longshore.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


def one_line(folder: Path) -> None:
    model = nn.Linear(8, 8)
    optimizer = longshore.AdamW(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    written: Path = longshore.save(folder, model, optimizer, tag="first", state={"epoch": 3}, keep_last=2)
    longshore.save(folder, model, optimizer, tag="second", async_save=True)
    longshore.wait_for_checkpoint()
    assert longshore.load(folder, model, optimizer, tag=written.name)["epoch"] == 3


def with_an_engine(folder: Path) -> None:
    engine = longshore.initialize(model=nn.Linear(8, 8), config=CONFIG).engine
    try:
        engine.load_checkpoint(folder)
    except longshore.NoCheckpointError:
        print("the first start")
    engine.backward(engine(torch.randn(2, 8)).square().mean())
    engine.step()
    engine.save_checkpoint(folder, tag="step_1", client_state={"epoch": 1}, async_save=True)
    engine.wait_for_checkpoint()
    path, client_state = engine.load_checkpoint(folder, "step_1")
    assert path is not None and client_state["epoch"] == 1
    for parameter in engine.module.parameters():
        master = safe_get_full_fp32_param(parameter)
        moment = safe_get_full_optimizer_state(parameter, "exp_avg")
        assert master is not None and moment is not None and master.shape == moment.shape
    engine.destroy()


def main() -> None:
    one_line(Path("one_line"))
    with_an_engine(Path("engine"))


if __name__ == "__main__":
    main()

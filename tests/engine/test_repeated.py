"""Engine after engine in one process, as in notebooks and test suites."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import copy, faulthandler, sys
import torch
import torch.distributed as dist
from torch import nn
import longshore

faulthandler.dump_traceback_later(100, exit=True)  # it would wait for ever
torch.set_num_threads(1)
stage, count, own, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "own", sys.argv[4]
if own:
    dist.init_process_group("gloo")
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": stage},
    "gradient_clipping": 0.0,
}
for number in range(count):
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(8, 16 * (1 + number)), nn.ReLU(), nn.Linear(16 * (1 + number), 16))
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.0, fused=True)
    engine, *_ = longshore.initialize(model=model, config=config)
    if number % 4 == 2:
        try:
            engine.backward(engine(torch.randn(2, 7)).sum())
        except RuntimeError:
            engine.zero_grad()
    for _ in range(2):
        batch = torch.randn(2, 8)  # the same on all ranks: its mean gradient is the gradient
        plain(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(engine(batch).square().mean())
        engine.step()
    if number % 4 == 3:
        engine.save_checkpoint(folder)
    if number % 4 == 1:
        engine.backward(engine(batch).square().mean())  # it is destroyed in the middle of a window
    state = engine.module.state_dict()
    for name, value in plain.state_dict().items():
        whole = state[name].full_tensor() if stage == 3 else state[name]
        assert torch.equal(whole, value), (number, name)
    engine.destroy()
    assert dist.is_initialized() == own
print("done")
"""


def _run(commands: list[tuple[list[str], dict[str, str]]]) -> None:
    ranks = [
        subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for command, variables in commands
    ]
    for rank in ranks:
        out, errors = rank.communicate(timeout=300)
        assert rank.returncode == 0 and "done" in out, errors


@pytest.mark.medium
@pytest.mark.parametrize(
    "stage, count, own",
    [
        (1, 4, "none"),
        pytest.param(3, 20, "none", marks=pytest.mark.slow),
        pytest.param(2, 20, "own", marks=pytest.mark.slow),
        *(
            pytest.param(stage, 20, own, marks=pytest.mark.full)
            for stage in range(4)
            for own in ("none", "own")
            if (stage, own) not in ((3, "none"), (2, "own"))
        ),
    ],
)
def test_ranks_that_variables_name(stage: int, count: int, own: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", _SCRIPT, str(stage), str(count), own, str(tmp_path)]
    _run([(command, {**common, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage", [0, pytest.param(1, marks=pytest.mark.full), 2, pytest.param(3, marks=pytest.mark.full)]
)
def test_torchruns_ranks(stage: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    _run([([*torchrun, str(script), str(stage), "20", "none", str(tmp_path / "checkpoints")], {})])

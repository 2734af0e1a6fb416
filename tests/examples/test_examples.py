"""The examples run as the README says, on one rank and under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCH = {
    1: [sys.executable],
    2: [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
}


def run(ranks: int, script: str, *arguments: str) -> str:
    done = subprocess.run(
        [*LAUNCH[ranks], str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


ALONE = pytest.param(1, marks=pytest.mark.full)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [ALONE, 2])
def test_multi_task(ranks: int) -> None:
    out = run(ranks, "multi_task.py", "--check", "--steps", "5")
    for rank in range(ranks):
        assert f"rank {rank}: weights equal those of plain PyTorch, bit for bit: True" in out
    assert "step 0: sentiment 2.761, topic 3.480, language 3.864" in out
    assert f"longshore: stage 2, rank 0 of {ranks}" in out
    # Of five steps, one in three uses the first head, which was idle in the last.
    idle = re.search(r"heads\.sentiment\.weight .*", out)
    assert idle is not None
    assert [cell.strip() for cell in re.split("[│|]", idle[0])][4:8] == ["2", "0", "0", "0"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [ALONE, 2])
def test_train_torchrun(ranks: int) -> None:
    out = run(ranks, "train_torchrun.py", "--epochs", "2", "--samples", "320")
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss ([\d.]+)", out)]
    assert len(losses) == 2 and losses[1] < losses[0] < 2.4
    # 320 samples in batches of 8, two backwards a step.
    steps = 20 // ranks
    assert f"epoch 1: loss {losses[1]:.3f}, {2 * steps} steps" in out
    assert re.search(r"step 5, skipped 0, lr .*, gradient norm", out)  # steps_per_print of the file

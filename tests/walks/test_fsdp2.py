"""Somebody with FSDP2's CPU offload keeps FSDP2 and changes the optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from walks.running import ROOT, TORCHRUN, run, same, written

IMPORT = ("import torch.distributed as dist\n", "import torch.distributed as dist\nimport longshore\n")
KEPT_ON_THE_DEVICE = (", offload_policy=offload_policy)", ")")
ONE_LINE = ("torch.optim.AdamW(", "longshore.AdamW(")


@pytest.mark.slow
def test_the_weights_are_those_of_the_offload_policy(tmp_path: Path) -> None:
    page = (ROOT / "docs/from_fsdp2.md").read_text()
    assert "# was: offload_policy=CPUOffloadPolicy()" in page and "# was: torch.optim.AdamW(..., fused=True)" in page
    plain = written("fsdp2.py", tmp_path)
    ours = written("fsdp2.py", tmp_path, IMPORT, KEPT_ON_THE_DEVICE, ONE_LINE)
    run(plain, "--out", tmp_path / "plain", launcher=TORCHRUN)
    run(ours, "--out", tmp_path / "ours", launcher=TORCHRUN)
    expected = torch.load(tmp_path / "plain/weights.pt")
    assert same(torch.load(tmp_path / "ours/weights.pt"), expected)

    # The optimizer is changed in the middle of a run, from its checkpoint.
    run(plain, "--out", tmp_path / "began", "--steps", 2, launcher=TORCHRUN)
    assert not same(torch.load(tmp_path / "began/weights.pt"), expected)
    run(ours, "--out", tmp_path / "ended", "--load", tmp_path / "began/2", launcher=TORCHRUN)
    assert same(torch.load(tmp_path / "ended/weights.pt"), expected)

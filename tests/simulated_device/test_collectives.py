"""Collectives of simulated devices run on streams, after what is on the current one, and give gloo's values."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from simulated_device import collective_ranks

pytestmark = pytest.mark.simulated


@pytest.mark.medium
def test_every_collective(tmp_path: Path) -> None:
    command = [sys.executable, collective_ranks.__file__]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            env={"PYTHONPATH": ":".join(sys.path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [each.communicate(timeout=120)[1] for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0], "\n".join(said)

"""Each part of ``python -m benchmarks`` runs, in a small size; the engine's needs DeepSpeed and is left out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import Part

ROOT = Path(__file__).parents[2]


# The plan's measures for minutes what a plan assumes, in any size.
PARTS = [
    pytest.param(part.value, marks=pytest.mark.full if part is Part.plan else pytest.mark.slow)
    for part in Part
    if part is not Part.engine
]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs(part: str) -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--part", part]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("--quick: ")

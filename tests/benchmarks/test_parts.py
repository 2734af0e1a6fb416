"""Each part of ``python -m benchmarks`` runs, in a small size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import Part

ROOT = Path(__file__).parents[2]


LONGEST = (Part.engine, Part.plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", [pytest.param(part.value, marks=[pytest.mark.full] if part in LONGEST else []) for part in Part]
)
def test_a_part_runs(part: str) -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--part", part]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("--quick: ")

"""Where the system gives no memory, a step or a load says so, changes nothing, and can be called again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.medium
@pytest.mark.parametrize(
    ("kind", "place", "more_mib"),
    [("step", "fp32", 1), ("step", "fp32", 20), ("step", "bf16", 10), ("load", "", 1), ("load", "", 40)],
)
def test_a_retry_is_as_if_there_had_been_memory(tmp_path: Path, kind: str, place: str, more_mib: int) -> None:
    program = Path(__file__).with_name("memory_cases.py")
    command = [sys.executable, str(program), kind, place or str(tmp_path), str(more_mib)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.stdout == "as with enough memory\n", ran.stderr

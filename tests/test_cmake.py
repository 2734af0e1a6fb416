"""What CMakeLists.txt refuses before it compiles anything."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("system", ["Darwin", "Windows", "FreeBSD"])
def test_other_systems_are_refused_with_a_sentence(system: str, tmp_path: Path) -> None:
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("needs cmake")
    command = [cmake, "-S", ROOT, "-B", tmp_path, f"-DCMAKE_SYSTEM_NAME={system}", "-DLONGSHORE_NATIVE_TESTS=ON"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert f"longshore needs Linux (on x86-64 or aarch64), and this is {system}" in said

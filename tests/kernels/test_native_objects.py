"""No code of a raised instruction set may reach a CPU that lacks it.

An inline function with external linkage is emitted in every object that uses
it, and the linker keeps one copy for the whole library: perhaps the AVX-512
one, in the path of a CPU without AVX-512. So the kernels' objects define their
table and nothing else that the linker sees.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "native"
FLAGS = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"],
}


def symbols(source: Path, flags: list[str], folder: Path) -> list[tuple[str, str]]:
    """(kind, name) of all that the linker sees of an object, undefined symbols included."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None or shutil.which("nm") is None:
        pytest.skip("needs a C++ compiler and nm")
    target = folder / "kernels.o"
    # Without optimization nothing is inlined away, so what could be emitted is.
    options = ["-std=c++20", "-O0", "-fno-exceptions", "-fPIC", "-DLONGSHORE_X86_64", f"-I{NATIVE}", *flags]
    subprocess.run([compiler, *options, "-c", source, "-o", target], check=True)
    lines = subprocess.run(["nm", "-C", target], check=True, capture_output=True, text=True).stdout.splitlines()
    rows = [line[17:].split(" ", 1) for line in lines]
    return [(kind, name) for kind, name in rows if kind.isupper() or kind in "uvw"]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="one instruction set only")
@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_kernel_objects_define_their_table_alone(isa: str, tmp_path: Path) -> None:
    table = f"longshore::k{isa.capitalize()}Kernels"
    seen = [(kind, name) for kind, name in symbols(NATIVE / f"kernels_{isa}.cpp", FLAGS[isa], tmp_path) if kind != "U"]
    assert [name for _, name in seen] == [table], seen
    assert all(kind in "DR" for kind, _ in seen), seen


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="one instruction set only")
def test_an_inline_function_would_be_seen(tmp_path: Path) -> None:
    leaky = tmp_path / "leaky.cpp"
    leaky.write_text(
        'inline float twice(float x) { return 2 * x; }\nfloat (*use)(float) = twice;\n#include "kernels_avx2.cpp"\n'
    )
    assert ("W", "twice(float)") in symbols(leaky, FLAGS["avx2"], tmp_path)

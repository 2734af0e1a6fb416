"""What Triton's compiler and the assembler make of the kernels, read for several GPUs; test_device.py runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from kernels.gpu_assembly import Assembler, MachineCode, Operations, Reference, differences, ptx_operations

pytestmark = pytest.mark.slow

STATEFUL = ("adam", "lion", "adagrad", "momentum")
EXPECTED = {
    # fma, div, sqrt for each element: every fma that update() writes (in both branches), and no other.
    "adam": (3, 2, 1),
    "adam that adopts": (3, 2, 1),
    "lion": (2, 0, 0),
    "adagrad": (2, 1, 1),
    "momentum": (4, 0, 0),
    "sgd": (4, 0, 0),
    "muon's momentum": (2, 0, 0),
    "muon's update": (1, 0, 0),
    "accumulate": (0, 0, 0),
    "reconcile": (0, 0, 0),
    "sum_of_squares": (0, 0, 0),
    "checksums": (0, 0, 0),
}
# States in another format are decoded and encoded without any of these.
EXPECTED |= {f"{kernel}, {states}": EXPECTED[kernel] for kernel in STATEFUL for states in ("bf16", "8bit")}
FUSED = ("lion", "sum_of_squares")  # have a product that is added: float32 and float64
PER_THREAD = 8  # elements: 1024 of a program by 4 warps of 32 threads
CONVERSIONS = {"cvt.rn.f32.u16", "cvt.f64.f32"}  # exact


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the PTX and the machine code of all kernels, for all architectures. No GPU is needed."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("compiled")
    done = subprocess.run(
        [sys.executable, "-m", "kernels.compile_kernels", str(folder)],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


class Gpu(NamedTuple):
    tools: Assembler
    ptx: dict[str, str]
    """Of each kernel."""
    reference: Reference

    def machine_code(self, kernel: str) -> MachineCode:
        return self.tools.disassembled(self.tools.compiled / f"{kernel}.{self.tools.architecture}.cubin")


@pytest.fixture(scope="module", params=[80, 90, 100, 120])
def gpu(request: pytest.FixtureRequest, compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> Gpu:
    tools = Assembler(request.param, compiled, tmp_path_factory.mktemp("assembled"))
    found = {path.name.split(".")[0]: path.read_text() for path in compiled.glob(f"*.{request.param}.ptx")}
    return Gpu(tools, found, tools.reference(found["adam"]))


def what_changes_bits(counts: Operations, kernel: str) -> list[str]:
    """What PTX has that is no operation of ours, rounded to nearest, without a flush to zero."""
    exact = ("ld", "st", "mov", "setp", "selp", "abs", "neg")
    others = [name for name in counts if name.split(".")[0] not in exact and name not in CONVERSIONS]
    told = [name for name in counts if "ftz" in name or "approx" in name or "full" in name]
    told += [name for name in others if name.split(".")[0] not in ("add", "sub", "mul", "fma", "div", "sqrt")]
    told += [name for name in others if name.split(".")[1] != "rn"]
    ours = [counts[f"{name}.rn.f32"] for name in ("fma", "div", "sqrt")]
    if ours != [PER_THREAD * count for count in EXPECTED[kernel]]:
        told.append(f"fma, div and sqrt: {ours}")
    return told


def test_the_compiler_keeps_every_rounding(gpu: Gpu) -> None:
    """No fused operation but our own, no approximation, no flush to zero in the PTX."""
    found = dict(gpu.ptx)
    for kernel in FUSED:
        assert what_changes_bits(ptx_operations(found.pop(f"{kernel} that fuses")), kernel)
    assert found.keys() == EXPECTED.keys()
    assert {kernel: what_changes_bits(ptx_operations(ptx), kernel) for kernel, ptx in found.items()} == {
        kernel: [] for kernel in EXPECTED
    }


def test_the_assembler_keeps_every_rounding(gpu: Gpu) -> None:
    """The machine code has the operations of the PTX, and what its divisions and roots are made of, and no other."""

    def found(kernel: str, code: str) -> list[str]:
        return differences(gpu.machine_code(code), ptx_operations(gpu.ptx[kernel]), gpu.reference)

    assert {kernel: found(kernel, kernel) for kernel in EXPECTED} == {kernel: [] for kernel in EXPECTED}
    assert all(found(kernel, f"{kernel} that fuses") for kernel in FUSED)


@pytest.mark.parametrize(
    ("kernel", "pattern", "replacement", "count"),
    [
        pytest.param("lion", r"\b(add|sub|mul)\.rn\.", r"\1.", 0, id="fused by the assembler"),
        pytest.param("sum_of_squares", r"\b(add|mul)\.rn\.", r"\1.", 0, id="fused in float64 by the assembler"),
        pytest.param("adam", r"\bmul\.rn\.f32", "mul.rn.ftz.f32", 1, id="one multiplication flushes"),
        pytest.param("adam", r"\badd\.rn\.f32 ", "add.rn.ftz.f32 ", 1, id="one addition flushes"),
        pytest.param("adam", r"\bfma\.rn\.f32", "fma.rn.ftz.f32", 1, id="one fma flushes"),
        pytest.param("adam", r"\bfma\.rn\.f32", "fma.rz.f32", 1, id="one fma rounds to zero"),
        pytest.param("adam", r"\bdiv\.rn\.f32", "div.approx.f32", 1, id="one approximate division"),
        pytest.param("adam", r"\bdiv\.rn\.f32", "div.full.f32", 1, id="one nearly exact division"),
        pytest.param("adam", r"\bdiv\.rn\.f32", "div.rn.ftz.f32", 1, id="one division flushes"),
        pytest.param("adam", r"\bdiv\.rn\.f32", "div.rn.ftz.f32", 0, id="all divisions flush"),
        pytest.param("adam", r"\bsqrt\.rn\.f32", "sqrt.approx.f32", 1, id="one approximate root"),
        pytest.param("adam", r"\bsqrt\.rn\.f32", "sqrt.rn.ftz.f32", 0, id="all roots flush"),
        pytest.param("adam", r"\bsetp\.(\w+)\.f32", r"setp.\1.ftz.f32", 1, id="one comparison flushes"),
    ],
)
def test_what_changes_bits_is_seen(gpu: Gpu, kernel: str, pattern: str, replacement: str, count: int) -> None:
    """In the PTX, and by itself in the machine code that comes of it."""
    ptx = gpu.ptx[kernel]
    changed, changes = re.subn(pattern, replacement, ptx, count=count)
    assert changes > 0
    assert what_changes_bits(ptx_operations(changed), kernel)
    assert differences(gpu.tools.assembled(changed, "--fmad=true"), ptx_operations(ptx), gpu.reference)

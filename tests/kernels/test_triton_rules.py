"""What Triton's compiler makes of the kernels, read from the assembly; test_device.py runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = """
import collections, json, re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import longshore.optim.rules
from longshore.kernels import triton_rules
from longshore.optim.rules.adagrad import adagrad
from longshore.optim.rules.adam import adam
from longshore.optim.rules.lion import lion
from longshore.optim.rules.sgd import sgd

TILE = {"source_buffer": "*fp32", "target_buffer": "*fp32", "table": "*i64", "owners": "*i64",
        "scalar_rows": "*fp32", "UPDATE": "constexpr", "BUFFER_ARRAYS": "constexpr", "ADOPT": "constexpr"}
PASS = {"target": "i64", "source": "i64", "dtype": "i32", "numel": "i32", "add": "i32"}
SUM = {"starts": "*i64", "spans": "*i64", "factors": "*fp32", "sums": "*fp64"}

def operations(name, signature, **constants):
    source = ASTSource(fn=getattr(triton_rules, name), signature=signature, constexprs=constants)
    target, options = GPUTarget("cuda", 80, 32), {"enable_fp_fusion": False, "num_warps": 4}
    assembly = triton.compile(source, target=target, options=options).asm["ptx"]
    instruction = r"^\\s*(?:@%p\\d+ )?([a-z0-9]+[.][a-z0-9.]*f(?:32|64)[a-z0-9.]*)"
    return collections.Counter(re.findall(instruction, assembly, re.M))

CHECKSUMS = {"table": "*i64", "owners": "*i64", "sums": "*i64"}

def step(update, buffer_arrays, adopt=False):
    function = triton_rules.device_function(update)
    return operations("step_tile", TILE, UPDATE=function, BUFFER_ARRAYS=buffer_arrays, ADOPT=adopt)

print(json.dumps({
    "adam": step(adam, 3),
    "adam that adopts": step(adam, 3, True),
    "lion": step(lion, 2),
    "adagrad": step(adagrad, 2),
    "momentum": step(sgd, 2),
    "sgd": step(sgd, 1),
    "accumulate": operations("accumulate", PASS),
    "sum_of_squares": operations("sum_of_squares", SUM),
    "checksums": operations("checksums", CHECKSUMS),
}))
"""

EXPECTED = {
    # fma, div, sqrt for each element: every fma that update() writes (in both branches), and no other.
    "adam": (3, 2, 1),
    "adam that adopts": (3, 2, 1),
    "lion": (2, 0, 0),
    "adagrad": (2, 1, 1),
    "momentum": (4, 0, 0),
    "sgd": (4, 0, 0),
    "accumulate": (0, 0, 0),
    "sum_of_squares": (0, 0, 0),
    "checksums": (0, 0, 0),
}
PER_THREAD = 8  # elements: 1024 of a program by 4 warps of 32 threads


@pytest.mark.slow
def test_the_compiler_keeps_every_rounding(tmp_path: Path) -> None:
    """No fused operation but our own, no approximation, no flush to zero. Needs no GPU."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == EXPECTED.keys()
    for kernel, counts in found.items():
        arithmetic = {name for name in counts if name.split(".")[0] not in ("ld", "st", "mov", "setp", "selp", "cvt")}
        rounding = {name for name in arithmetic if name.split(".")[0] not in ("abs", "neg")}
        assert {name.split(".")[0] for name in rounding} <= {"add", "sub", "mul", "fma", "div", "sqrt"}, kernel
        assert all(name.split(".")[1] == "rn" for name in rounding), kernel
        assert not any("ftz" in name or "approx" in name for name in counts), kernel
        ours = [counts.get(f"{name}.rn.f32", 0) for name in ("fma", "div", "sqrt")]
        assert ours == [PER_THREAD * count for count in EXPECTED[kernel]], kernel

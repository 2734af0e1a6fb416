"""docs/adding_an_optimizer.md, followed: its rule, its native entry and its names are what the page says."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from code_blocks import ROOT, blocks_of

PAGE = ROOT / "docs/adding_an_optimizer.md"
RULE, STRUCT, ROW = (block.text for block in blocks_of(PAGE) if block.language in ("python", "text"))
FLAGS = {
    "BASELINE": [],
    "AVX2": ["-mavx2", "-mfma"],
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"],
}
ONE_STEP = """
#define LONGSHORE_KERNEL_TABLE kBaselineKernels
#include "kernels.inl"

extern "C" void step(const float* scalars, float* master, float* state, const float* gradient, size_t numel) {
    longshore::Span span{};
    span.in[0] = span.out[0] = master;
    span.in[1] = span.out[1] = state;
    span.arrays = 2;
    span.gradient = gradient;
    span.numel = numel;
    longshore::kBaselineKernels.rules[0].step(scalars, longshore::DType::float32, longshore::DType::none, span, false);
}
"""

BEGIN = """
import ctypes, sys
import pytest
import torch
sys.path.insert(0, sys.argv[1])
from signum import Signum, SignumRule
from kernels.numbers import awkward, buffer_of, same_bits, stepped_buffer
from longshore.kernels import HostKernels, TileSegment

rule, buffer, gradient = SignumRule(1e-2, 0.9, 0.1), buffer_of(1100, 1, 2), awkward(1100, 9)
expected = stepped_buffer(buffer, gradient, rule)
assert not torch.equal(expected, buffer)
"""

FORMULA = """
values, moment = torch.randn(4096), torch.randn(4096)
g = torch.randn(4096)
master, after = stepped_buffer(torch.stack([values, moment]), g, rule)
exact = 0.9 * moment.double() + 0.1 * g.double()
torch.testing.assert_close(after.double(), exact, rtol=1e-5, atol=1e-6)
clear = exact.abs() > 1e-5
expected = values.double() * (1 - 1e-2 * 0.1) - 1e-2 * exact.sign()
torch.testing.assert_close(master.double()[clear], expected[clear], rtol=1e-5, atol=1e-6)

parameter = torch.nn.Parameter(torch.zeros(8))
optimizer = Signum([parameter])
parameter.grad = torch.ones(8)
with pytest.raises(ValueError, match=r"native/rules.inl has no entry for Signum; it has Adam, Lion"):
    optimizer.step()

from longshore.engine.config import Config
assert Config(optimizer={"type": "Signum"}).optimizer.arguments()["momentum"] == 0.9
"""

TRITON = """
from kernels.device_kernels import DEVICE, device_kernels
found = buffer.to(DEVICE, copy=True)
from unittest import mock
from longshore.kernels import host
# The native code checks the tile of a device, too, and has no such entry here.
unchecked = mock.patch("longshore.kernels.device._native", mock.Mock())
with mock.patch.dict(host._ENTRIES, Signum=0), device_kernels() as kernels, unchecked:
    kernels.step_tile(found, found, [TileSegment(0, gradient.to(DEVICE), None, 0)], [rule])
assert same_bits(found.cpu(), expected)
"""

NATIVE = """
library = ctypes.CDLL(sys.argv[2])
scalars = torch.tensor([1.0, 1.0, *rule.scalars])
assert int(sys.argv[3]) == len(scalars)
found = buffer.clone()
pointers = [each.data_ptr() for each in (scalars, found[0], found[1], gradient)]
library.step(*map(ctypes.c_void_p, pointers), ctypes.c_size_t(gradient.numel()))
assert same_bits(found, expected)
"""


def follow(folder: Path, case: str, *arguments: str) -> None:
    """In a process of its own, where the rule is one of longshore's."""
    (folder / "signum.py").write_text(RULE)
    path = os.pathsep.join(map(str, (ROOT / "tests", ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + case, str(folder), *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_rule_is_its_formula_and_is_configured_by_name(tmp_path: Path) -> None:
    follow(tmp_path, FORMULA)


@pytest.mark.slow
def test_triton_has_the_rule_from_its_file(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    follow(tmp_path, TRITON)


@pytest.mark.slow
@pytest.mark.parametrize("instructions", FLAGS)
def test_the_native_entry_gives_the_same_bits(tmp_path: Path, instructions: str) -> None:
    """Compiled alone: the rules that are there take minutes."""
    from longshore.kernels._native import supported_instruction_sets

    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None or instructions not in {each.name for each in supported_instruction_sets()}:
        pytest.skip("needs a C++ compiler, and a CPU with these instructions")
    native = tmp_path / "native"
    shutil.copytree(ROOT / "native", native)
    rules = (native / "rules.inl").read_text()
    assert RULE.count("Signum") > 3 and "Signum" not in rules
    table = f"{STRUCT}\nconstexpr RuleEntry kRules[] = {{\n{ROW}}};\n"
    changed, count = re.subn(r"constexpr RuleEntry kRules\[\] = \{.*?\n\};\n", table, rules, flags=re.DOTALL)
    assert count == 1
    (native / "rules.inl").write_text(changed)
    (native / "one_step.cpp").write_text(ONE_STEP)
    library = tmp_path / "one_step.so"
    options = ["-std=c++20", "-O0", "-ffp-contract=off", "-fPIC", "-shared", f"-I{native}", *FLAGS[instructions]]
    subprocess.run([compiler, *options, native / "one_step.cpp", "-o", library], check=True)
    scalars = re.findall(r'\{"Signum", (\d+), 2, 2, step_by<Signum>\}', ROW)
    follow(tmp_path, NATIVE, str(library), *scalars)


# -- what the page names ------------------------------------------------------


def _names_in(path: Path) -> set[str]:
    text = path.read_text()
    if path.suffix != ".py":
        return set(re.findall(r"\w+", text))
    tree = ast.parse(text)
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    targets = [each for node in ast.walk(tree) if isinstance(node, ast.Assign) for each in node.targets]
    targets += [node.target for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
    return {node.name for node in nodes} | {each.id for each in targets if isinstance(each, ast.Name)}


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("tests/kernels/numbers.py", "OTHER_RULES"),
        ("tests/kernels/test_device.py", "TABLES"),
        ("tests/kernels/compile_kernels.py", "_WITH_STATES"),
        ("tests/kernels/test_encoded.py", "by_name"),
        ("native/tests/step_support.h", "kEntry"),
        ("tests/support.py", "Kind KINDS"),
        ("src/longshore/layout/formats.py", "NEVER_NEGATIVE"),
        ("src/longshore/engine/config/optimizers.py", "_FIELDS"),
        ("src/longshore/__init__.py", "_HOMES"),
        ("native/rules.inl", "kRules kNeverNegative mask_of choose"),
        ("native/kernels.h", "kMostArrays"),
        ("src/longshore/kernels/reference.py", "scalar fma divide root where"),
        ("src/longshore/optim/family.py", "more_fields encodable"),
        ("src/longshore/optim/tiled_optimizer.py", "twin"),
    ],
)
def test_a_name_of_the_page_is_in_its_file(file: str, names: str) -> None:
    text = PAGE.read_text()
    for name in names.split():
        assert name in _names_in(ROOT / file), f"{file} has no {name}"
        assert f"`{name}`" in text
    assert f"`{file}`" in text


def test_every_function_for_triton_is_named() -> None:
    from longshore.kernels.reference import divide, fma, root, scalar, where

    source = (ROOT / "src/longshore/kernels/triton_rules.py").read_text()
    replaced = re.findall(r'"(\w+)"', source.partition("_NAMES = {")[2].partition("}")[0])
    assert {*replaced} - {"tl"} == {each.__name__ for each in (scalar, fma, divide, root, where)}

"""Compiles the Triton kernels for several GPUs: ``python -m kernels.compile_kernels FOLDER`` with ``tests`` in
``PYTHONPATH`` and ``TRITON_INTERPRET=0``. It needs no GPU.

For each kernel and architecture it writes ``KERNEL.ARCHITECTURE.ptx`` and ``.cubin``, and to ``tools.json`` the
assembler that Triton uses for each architecture and its disassembler.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from longshore.kernels import Rule, triton_rules
from longshore.layout.formats import StateFormat
from longshore.optim.rules.adagrad import AdagradRule
from longshore.optim.rules.adam import AdamRule
from longshore.optim.rules.lion import LionRule
from longshore.optim.rules.muon import MomentumRule, UpdateRule
from longshore.optim.rules.sgd import SGDRule

ARCHITECTURES = (80, 90, 100, 120)

_TILE = {
    "source_buffer": "*fp32",
    "target_buffer": "*fp32",
    "table": "*i64",
    "owners": "*i64",
    "scalar_rows": "*fp32",
    "UPDATE": "constexpr",
    "FIRST": "constexpr",
    "SECOND": "constexpr",
    "ADOPT": "constexpr",
    "OUTPUT_LAST": "constexpr",
}
_PASS = {"target": "i64", "source": "i64", "dtype": "i32", "numel": "i32", "add": "i32"}
_RECONCILE = {"master": "i64", "parameter": "i64", "dtype": "i32", "numel": "i32", "adopt": "i32", "differing": "*u8"}
_SUM = {"starts": "*i64", "spans": "*i64", "factors": "*fp32", "sums": "*fp64"}
_CHECKSUMS = {"table": "*i64", "owners": "*i64", "sums": "*i64"}

_WITH_STATES = {"adam": (AdamRule, 3), "lion": (LionRule, 2), "adagrad": (AdagradRule, 2), "momentum": (SGDRule, 2)}
"""Rules, and arrays of their buffers, that are compiled for each format of states."""


class _Kernel(NamedTuple):
    label: str
    name: str
    signature: dict[str, str]
    constants: dict[str, Any] | None = None
    num_warps: int = 4
    fuses: bool = False
    """Whether the compiler may fuse operations. None of ours lets it: the tests have to see it."""


def _step(
    label: str, rule: type[Rule], arrays: int, adopt: bool = False, format: StateFormat = StateFormat.FP32
) -> _Kernel:
    first, second = triton_rules.state_codes(rule.states[: arrays - 1], format)
    constants = {"UPDATE": triton_rules.device_function(rule.update), "FIRST": first, "SECOND": second, "ADOPT": adopt}
    constants["OUTPUT_LAST"] = rule.outputs_last
    return _Kernel(label, "step_tile", _TILE, constants)


def _kernels() -> Iterator[_Kernel]:
    for name, (rule, arrays) in _WITH_STATES.items():
        yield _step(name, rule, arrays)
        yield _step(f"{name}, bf16", rule, arrays, format=StateFormat.BF16)
        yield _step(f"{name}, 8bit", rule, arrays, format=StateFormat.EIGHT_BIT)
    yield _step("adam that adopts", AdamRule, 3, adopt=True)
    yield _step("lion that fuses", LionRule, 2)._replace(fuses=True)
    yield _step("sgd", SGDRule, 1)
    yield _step("muon's momentum", MomentumRule, 1)
    yield _step("muon's update", UpdateRule, 1)
    yield _Kernel("accumulate", "accumulate", _PASS)
    yield _Kernel("reconcile", "reconcile", _RECONCILE)
    yield _Kernel("sum_of_squares", "sum_of_squares", _SUM, num_warps=1)
    yield _Kernel("sum_of_squares that fuses", "sum_of_squares", _SUM, num_warps=1, fuses=True)
    yield _Kernel("checksums", "checksums", _CHECKSUMS)


def main(folder: Path) -> None:
    for kernel in _kernels():
        source = ASTSource(getattr(triton_rules, kernel.name), kernel.signature, kernel.constants)
        options = {"enable_fp_fusion": kernel.fuses, "num_warps": kernel.num_warps}
        for architecture in ARCHITECTURES:
            compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
            (folder / f"{kernel.label}.{architecture}.ptx").write_text(compiled.asm["ptx"])
            (folder / f"{kernel.label}.{architecture}.cubin").write_bytes(compiled.asm["cubin"])
    assemblers = {architecture: get_ptxas(architecture).path for architecture in ARCHITECTURES}
    (folder / "tools.json").write_text(json.dumps({"ptxas": assemblers, "nvdisasm": knobs.nvidia.nvdisasm.path}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

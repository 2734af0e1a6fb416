"""Counts of the floating-point operations in a kernel's PTX, and in the machine code (SASS) that is assembled from it.

SASS has no division and no square root. A ``div.rn.f32`` or ``sqrt.rn.f32`` becomes an approximation (MUFU), a few
fused operations that make it exact, and a function for operands out of the ordinary range. How many of each, says the
machine code of one division and of one root, assembled for the same GPU: a :class:`Reference`. What PTX asks for is
then the exact number of every operation that rounds, with its modifiers, and the machine code has to have just these.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import NamedTuple

_PTX = re.compile(r"(?:^|[;{}])\s*(?:@!?%p\d+\s+)?([a-z]\w*(?:\.\w+)*\.(?:f|bf|tf)(?:16|32|64)(?:x2)?(?:\.\w+)*)", re.M)
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*(?:\.[A-Z0-9_]+)*)\s*([^;]*);")
_FUNCTION = re.compile(r"(?:\$__internal_\d+_)?([\w$]+):")

_ROUNDS = {"FADD", "FMUL", "FFMA", "DADD", "DMUL", "DFMA", "MUFU", "FCHK"}
"""FCHK rounds nothing, but belongs to a division."""
_PACKED = {"FADD2": "FADD", "FMUL2": "FMUL", "FFMA2": "FFMA"}
_EXACT = {"FSEL", "FSET.BF.GT.AND", "I2F.U16", "F2F.F64.F32"}
"""Selections, comparisons and conversions that never round."""
_COMPARISON = re.compile(r"FSETP\.(?:NAN|NEU|EQ|GE|GEU|GT|GTU|LT|LTU)\.AND")
_SASS_OF = {"add": "ADD", "sub": "ADD", "mul": "MUL", "fma": "FMA"}

Operations = Counter[str]
MachineCode = dict[str, list[tuple[str, str]]]
"""The instructions of each function, with their operands. The kernel is the first one."""


class Reference(NamedTuple):
    """The machine code of one division and of one square root."""

    div: MachineCode
    sqrt: MachineCode


def ptx_operations(ptx: str) -> Operations:
    """Return the instructions on floating-point numbers; those of ``x2``, on two at once, count twice."""
    found: Operations = Counter()
    for name in _PTX.findall(ptx):
        found[name.replace("x2", "")] += 2 if "x2" in name else 1
    return found


class Assembler:
    """Triton's assembler and disassembler for one architecture.

    Args:
        architecture: such as 80.
        compiled: what ``compile_kernels`` wrote.
        folder: for files that nobody needs later.
    """

    def __init__(self, architecture: int, compiled: Path, folder: Path) -> None:
        self.architecture = architecture
        self.compiled = compiled
        self._folder = folder
        tools = json.loads((compiled / "tools.json").read_text())
        self._ptxas, self._nvdisasm = tools["ptxas"][str(architecture)], tools["nvdisasm"]

    def assembled(self, ptx: str, *options: str) -> MachineCode:
        source, target = self._folder / "some.ptx", self._folder / "some.cubin"
        source.write_text(ptx)
        gpu = re.findall(r"^\.target (\w+)", ptx, re.M)[0]
        subprocess.run([self._ptxas, *options, f"--gpu-name={gpu}", source, "-o", target], check=True)
        return self.disassembled(target)

    def disassembled(self, cubin: Path) -> MachineCode:
        done = subprocess.run([self._nvdisasm, "-c", cubin], check=True, capture_output=True, text=True)
        functions: MachineCode = {}
        body: list[tuple[str, str]] = []
        for line in done.stdout.splitlines():
            if label := _FUNCTION.match(line):
                body = functions.setdefault(label[1], [])
            elif instruction := _INSTRUCTION.search(line):
                body.append((instruction[1], instruction[2].strip()))
        assert functions and all(functions.values()), done.stdout[:1000]
        return functions

    def reference(self, ptx: str) -> Reference:
        """Assemble one division and one root for the target of ``ptx``."""
        head = "\n".join(re.findall(r"^\.(?:version|target|address_size) .*$", ptx, re.M))
        kernel = (
            "{}\n.visible .entry kernel(.param .u64 p) {{ .reg .f32 %f<4>; .reg .b64 %a<2>; ld.param.u64 %a1, [p]; "
            "cvta.to.global.u64 %a1, %a1; ld.global.f32 %f1, [%a1]; ld.global.f32 %f2, [%a1+4]; {} "
            "st.global.f32 [%a1], %f3; ret; }}\n"
        )
        divided, rooted = "div.rn.f32 %f3, %f1, %f2;", "sqrt.rn.f32 %f3, %f1;"
        return Reference(*(self.assembled(kernel.format(head, each)) for each in (divided, rooted)))


def differences(code: MachineCode, asked: Operations, reference: Reference) -> list[str]:
    """Return how machine code differs from the operations ``asked`` for in PTX; nothing if it rounds as these do."""
    kernel, *slow_paths = code.items()
    expected = _expected(asked, reference)
    found = _rounding(kernel[1])
    told = [
        f"{name}: {found[name]}, not {expected[name]}" for name in found | expected if found[name] != expected[name]
    ]
    told += [f"{name} {operands} is not known" for name, operands in kernel[1] if not _known(name, operands)]
    expected_paths = {name: body for one in reference for name, body in one.items() if name != "kernel"}
    for name, body in slow_paths:
        if name not in expected_paths or _rounding(body) != _rounding(expected_paths[name]):
            told.append(f"the function {name} is not that of a division or root that rounds to nearest")
    return told


def _expected(asked: Operations, reference: Reference) -> Operations:
    expected: Operations = Counter()
    for name, count in asked.items():
        operation, *modifiers = name.split(".")
        if operation in _SASS_OF:
            flushes = ".FTZ" if "ftz" in modifiers else ""
            expected[("D" if "f64" in modifiers else "F") + _SASS_OF[operation] + flushes] += count
        elif operation in reference._fields:
            for each, of_one in _rounding(getattr(reference, operation)["kernel"]).items():
                expected[each] += count * of_one
    return expected


def _rounding(body: list[tuple[str, str]]) -> Operations:
    """Return the instructions that round, with their modifiers; those on two numbers at once count twice."""
    found: Operations = Counter()
    for name, operands in body:
        operation, dot, modifiers = name.partition(".")
        if _PACKED.get(operation, operation) in _ROUNDS and not _moves(name, operands):
            found[_PACKED.get(operation, operation) + dot + modifiers] += 2 if operation in _PACKED else 1
    return found


def _moves(name: str, operands: str) -> bool:
    """Return whether an addition of -0 moves a number or its absolute value, or a constant."""
    if name == "FADD":
        return "-RZ" in operands.split(", ")
    return name.startswith("HFMA2") and re.match(r"R\d+, -RZ, RZ, ", operands) is not None


def _known(name: str, operands: str) -> bool:
    """Return whether an instruction is no arithmetic on floating-point numbers, is counted, or never rounds."""
    operation = name.partition(".")[0]
    if not re.match(r"[DFH]|MUFU|[A-Z]2[FH]", operation):
        return True
    counted = _PACKED.get(operation, operation) in _ROUNDS
    return counted or name in _EXACT or _COMPARISON.fullmatch(name) is not None or _moves(name, operands)

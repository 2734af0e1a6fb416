"""Look at the machine code of the kernels for aarch64: nothing is contracted, and the arithmetic is vector code."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from scripts.aarch64.machine import Aarch64Error, run

KERNELS = "kernels_baseline.cpp"
FUSED = re.compile(r"fn?m(la|ls|add|sub|ad|sb)")
"""Instructions that round a product and a sum once."""
FUSED_FOR_EACH_ROOT = {"Adam<false>": 2, "Adam<true>": 3, "Adagrad": 2}
"""The fma's that native/rules.inl writes for one element, of rules that take one square root."""
_FUNCTION = re.compile(r"^[0-9a-f]+ <(?:void )?(?:longshore::)?(?:\(anonymous namespace\)::)?(.+)>:$")
_RULES = r"Adam<\w+>|Adagrad|Lion|Sgd<\w+>|Muon\w+"
_STEP = re.compile(rf"step_(?:encoded_)?span<(?:longshore::\(anonymous namespace\)::)?({_RULES})")


def instructions(disassembly: str) -> Iterator[tuple[str, str, str]]:
    """Yield function, instruction and operands of what ``objdump -d -C --no-show-raw-insn`` printed."""
    function = ""
    for line in disassembly.splitlines():
        if found := _FUNCTION.match(line):
            function = found[1]
        parts = line.split("\t")
        if len(parts) > 2:
            yield function, parts[1].strip(), parts[2]


def counts_of_steps(disassembly: str) -> dict[str, Counter[str]]:
    """Count for each rule the instructions of its steps by kind: ``fused``, ``root``, ``scalar`` (a fused one, a root
    or a quotient of one number), ``load`` and ``store`` (of a whole vector), and ``prefetch``."""
    counts: dict[str, Counter[str]] = {}
    for function, name, operands in instructions(disassembly):
        found = _STEP.match(function)
        if found is None:
            continue
        count = counts.setdefault(found[1], Counter())
        if FUSED.fullmatch(name) or name in ("fsqrt", "fdiv"):
            vector = re.match(r"v\d+\.4s", operands)
            kind = "fused" if FUSED.fullmatch(name) else "root" if name == "fsqrt" else "quotient"
            count[kind if vector else "scalar"] += 1
        elif name in ("ldr", "ldp", "ldur") and operands.startswith("q"):
            count["load"] += 1
        elif name in ("str", "stp", "stur") and operands.startswith("q"):
            count["store"] += 1
        elif name == "prfm":
            count["prefetch"] += 1
    return counts


def check_steps(counts: Mapping[str, Counter[str]]) -> str:
    """Check that rules are vector code with the fused instructions that they state, and return what was counted."""
    if len(counts) != 8:
        raise Aarch64Error(f"the kernels have steps of {sorted(counts)}; change scripts/aarch64/code.py")
    for rule, count in counts.items():
        if count["scalar"] or not (count["fused"] and count["load"] and count["store"] and count["prefetch"]):
            raise Aarch64Error(f"the arithmetic of {rule} is no vector code: {dict(count)}")
        wanted = FUSED_FOR_EACH_ROOT.get(rule)
        if wanted is not None and count["fused"] != wanted * count["root"]:
            raise Aarch64Error(
                f"{rule} has {count['fused']} fused instructions for {count['root']} roots: {wanted} each"
            )
    total = sum(counts.values(), Counter())
    return ", ".join(f"{number} {kind}" for kind, number in sorted(total.items()))


def command_of(build: Path) -> list[str]:
    """Return the command with which CMake compiles the kernels."""
    commands = json.loads((build / "compile_commands.json").read_text())
    (found,) = (each["command"] for each in commands if each["file"].endswith(KERNELS))
    return shlex.split(found)


def count_contracted(command: list[str], folder: Path, *more: str) -> int:
    """Compile the kernels without an fma of their own, and count the fused instructions that are there all the same."""
    target = folder / "contracted.o"
    own = command[: command.index("-o")]
    source = command[command.index("-c") + 1]
    run([*own, "-O2", "-DLONGSHORE_HAS_FMA=0", *more, "-c", source, "-o", target], "compiling the kernels")
    return sum(1 for _, name, _ in instructions(disassembled(target)) if FUSED.fullmatch(name))


def disassembled(file: Path) -> str:
    return run(["aarch64-linux-gnu-objdump", "-d", "-C", "--no-show-raw-insn", file], "objdump")


def check_code(build: Path) -> str:
    """Check the kernels of a build of the native tests, and return what was seen."""
    command = command_of(build)
    if number := count_contracted(command, build):
        raise Aarch64Error(f"the compiler contracted {number} products and sums that no fma is written for")
    if not count_contracted(command, build, "-ffp-contract=fast"):
        raise Aarch64Error("no contraction was seen with -ffp-contract=fast either, so the check shows nothing")
    (kernels,) = build.glob(f"CMakeFiles/**/{KERNELS}.o")
    return f"nothing contracted; vector code of the steps: {check_steps(counts_of_steps(disassembled(kernels)))}"

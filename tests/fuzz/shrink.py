"""Make a failing program small: fewer statements, then simpler ones (delta debugging)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

Fails = Callable[[list[str]], bool]
"""Whether a program still fails in the same way."""

_SIMPLER = (
    r", '?\w+'?(?:=|: )(?:\([^()]*\)|[^(){}\[\],]+)(?=[,)}])",  # an argument or an entry after the first
    r"(?<=\()\w+=[^(){}\[\],]+(?:, )?(?=\w+=|\))",  # the first argument
    r" \* [\w.]+(?:\([^()]*\))?(?=[).])",  # a factor
)
_FIRST_PARAMETER, _NUMBER = r"p\[\d+\]", r"(?<![\w.'\"])\d+\.?\d*(?:e-?\d+)?(?![\w.'\"])"


def shrunk(program: list[str], fails: Fails) -> list[str]:
    """The smallest program found that still fails; the given one has to fail."""
    program = _fewer(program, fails)
    while True:
        before = list(program)
        for place in range(len(program)):
            for simpler in _simpler(program[place]):
                changed = [*program[:place], simpler, *program[place + 1 :]]
                if fails(changed):
                    program = changed
                    break
        program = _fewer(program, fails)
        if program == before:
            return program


def _fewer(program: list[str], fails: Fails) -> list[str]:
    size = max(1, len(program) // 2)
    while True:
        place, removed = 0, False
        while place < len(program):
            rest = program[:place] + program[place + size :]
            if rest and fails(rest):
                program, removed = rest, True
            else:
                place += size
        if not removed and size == 1:
            return program
        size = size if removed and size == 1 else max(1, size // 2)


def _simpler(statement: str) -> Iterator[str]:
    lines = statement.split("\n")
    if len(lines) > 1:
        for place in range(len(lines)):
            yield "\n".join(lines[:place] + lines[place + 1 :])
        if lines[0].startswith(("with ", "for ", "if ")):
            yield "\n".join(line.removeprefix("    ") for line in lines[1:])
    for pattern in _SIMPLER:
        for found in re.finditer(pattern, statement):
            yield statement[: found.start()] + statement[found.end() :]
    for pattern, simplest in ((_FIRST_PARAMETER, "p[0]"), (_NUMBER, "0"), (_NUMBER, "1")):
        for found in re.finditer(pattern, statement):
            if found.group() not in (simplest, "0", "1", "p[0]"):
                yield statement[: found.start()] + simplest + statement[found.end() :]

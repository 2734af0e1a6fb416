"""Each line of SECURITY.md's threat model names tests, and they are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("| ")][2:]


def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_each_line_names_a_test() -> None:
    assert len(ROWS) > 10
    for row in ROWS:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        for path, function in named:
            assert function in functions_of(path), f"{path} has no {function}"

"""Every message of an error in the source, read from its syntax tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "longshore"

_CLASS = re.compile(r"(?:\w+Error|Diverged|StopNow)$")
_OTHERS = {
    "Problem": (1, "ConfigError"),
    "refuse": (0, "ConfigError"),
    "_refused": (1, "ValueError"),
    "_NotText": (0, "CommandError"),
}
"""Calls that make a message by another name: which argument has the words, and the class that users see."""


@dataclass(frozen=True)
class Message:
    """One place that makes an error.

    Attributes:
        file: relative to ``src/longshore``.
        line: from 1.
        kind: the class's name; of a ``Problem`` the :class:`ConfigError` that lists it.
        text: what it says; what is filled in is a name between « and ».
    """

    file: str
    line: int
    kind: str
    text: str


def messages() -> list[Message]:
    """All of them whose words are in the source where the error is made, by file and line."""
    return [message for path in sorted(SOURCE.rglob("*.py")) for message in messages_of(path)]


def messages_of(path: Path) -> Iterator[Message]:
    """Those of one file."""
    file, tree = path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: node.lineno):
        name = (_dotted(call.func) or "").rpartition(".")[2]
        place, kind = _OTHERS.get(name, (0 if _CLASS.match(name) else None, name))
        if place is None or len(call.args) <= place:
            continue
        for text in texts(call.args[place]):
            # What is one filled-in value has its words elsewhere.
            if re.search(r"\w \w", re.sub("«[^»]*»", "", text)):
                yield Message(file, call.lineno, kind, text)


def texts(node: ast.expr) -> list[str]:
    """Texts that an expression may give: several if it has alternatives."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        parts = (str(part.value) if isinstance(part, ast.Constant) else _filled(part) for part in node.values)
        return ["".join(parts)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [left + right for left in texts(node.left) for right in texts(node.right)]
    if isinstance(node, ast.IfExp):
        return texts(node.body) + texts(node.orelse)
    return [f"«{_word(node)}»"]


def _filled(part: ast.expr) -> str:
    assert isinstance(part, ast.FormattedValue)
    return f"«{_word(part.value)}»"


def _word(node: ast.expr) -> str:
    """A word for a value: the last of ``record.name``; of a call what it is about."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        return (_dotted(node) or "...").rpartition(".")[2].strip("_").lower()
    if isinstance(node, ast.Subscript):
        return _word(node.value)
    if isinstance(node, ast.Call):
        inner = node.args[0] if node.args and not isinstance(node.args[0], ast.Constant) else node.func
        return _word(node.args[1] if len(node.args) > 1 and _dotted(node.func) == "map" else inner)
    if isinstance(node, (ast.GeneratorExp, ast.ListComp, ast.SetComp)):
        return _word(node.elt)
    return "..."


def _dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        left = _dotted(node.value)
        return node.attr if left is None else f"{left}.{node.attr}"
    return None

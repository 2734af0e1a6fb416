"""What changed between two contents of ``docs/public_api.txt``, and whether programs break by it."""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

_LINE = re.compile(r"(?P<name>.+?)(?P<parameters>\(.*\))?(?:  (?P<note>.*))?")


class Changes(NamedTuple):
    """Descriptions of lines that differ: new ones and those that allow more, and those by which programs break."""

    added: list[str]
    broken: list[str]


def sections_of(text: str) -> dict[str, list[str]]:
    """Return the lines of the file by the titles of their sections."""
    found: dict[str, list[str]] = {}
    for block in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, *lines = block.splitlines()
        found[title] = [line for line in lines if line]
    return found


def changes(before: str, after: str) -> Changes:
    """Compare two contents of the file."""
    old, new = ({line for lines in sections_of(text).values() for line in lines} for text in (before, after))
    now = {_parsed(line)["name"]: line for line in new - old}
    added, broken = [], []
    for line in sorted(old - new):
        instead = now.pop(_parsed(line)["name"], None)
        if instead is None:
            broken.append(f"removed: {line}")
        elif allows(line, instead):
            added.append(f"extended: {line} -> {instead}")
        else:
            broken.append(f"changed: {line} -> {instead}")
    return Changes([*(f"added: {line}" for line in sorted(now.values())), *added], broken)


def _parsed(line: str) -> re.Match[str]:
    found = _LINE.fullmatch(line)
    assert found is not None, f"no name in {line!r}"
    return found


def allows(line: str, instead: str) -> bool:
    """Return whether every use of a name that ``line`` allows is allowed by ``instead``, too."""
    old, new = _parsed(line), _parsed(instead)
    (kind, _, before), (kind_now, _, notes) = ((each["note"] or "").partition("deprecated: ") for each in (old, new))
    if kind.strip() != kind_now.strip() or not _new_names(before).keys() <= _new_names(notes).keys():
        return False
    if (old["parameters"] is None) != (new["parameters"] is None):
        return False
    if old["parameters"] is None:
        return True
    renamed = re.sub(r"\w+", lambda name: _new_names(notes).get(name[0], name[0]), old["parameters"])
    was, now = Parameters.of(renamed), Parameters.of(new["parameters"])
    return (
        was.positional == now.positional[: len(was.positional)]
        and {*was.keyword} <= {*now.positional, *now.keyword}
        and was.stars <= now.stars
        and now.needed(len(was.positional)) <= was.needed(len(was.positional))
    )


def _new_names(notes: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+) for (\S+) until", notes))


class Parameters(NamedTuple):
    """Names of a function's parameters.

    Attributes:
        positional: those that may be given by position, in their order.
        keyword: those that are given by keyword only.
        optional: those that have a default.
        stars: ``vararg`` and ``kwarg``, if the function takes any more.
    """

    positional: list[str]
    keyword: list[str]
    optional: set[str]
    stars: set[str]

    @classmethod
    def of(cls, text: str) -> Parameters:
        """Read parameters as the file has them, in parentheses."""
        (function,) = ast.parse(f"def f{text}: ...").body
        assert isinstance(function, ast.FunctionDef)
        found = function.args
        positional = [each.arg for each in (*found.posonlyargs, *found.args)]
        keyword = [each.arg for each in found.kwonlyargs]
        optional = set(positional[len(positional) - len(found.defaults) :])
        optional |= {name for name, default in zip(keyword, found.kw_defaults, strict=True) if default is not None}
        return cls(positional, keyword, optional, {star for star in ("vararg", "kwarg") if getattr(found, star)})

    def needed(self, count: int) -> set[object]:
        """Return what has to be given: of the first ``count`` parameters the positions, of the others the names."""
        places = [at for at, name in enumerate(self.positional[:count]) if name not in self.optional]
        others = (*self.positional[count:], *self.keyword)
        return {*places, *(name for name in others if name not in self.optional)}

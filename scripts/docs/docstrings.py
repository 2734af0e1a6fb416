"""Docstrings, which are written with Sphinx's roles, as Markdown."""

from __future__ import annotations

import re

_ROLE = re.compile(r":(?:class|meth|func|mod|data|attr|exc):`~?([^`]+)`")


def without_roles(text: str) -> str:
    """``:class:`X``` as ``X``, in backquotes."""
    return _ROLE.sub(r"`\1`", text)


def one_line(text: str | None) -> str:
    """A docstring's text in one line of Markdown."""
    return without_roles(" ".join((text or "").split())).replace("``", "`").replace("|", "\\|")


def attributes_of(kind: type) -> dict[str, str]:
    """Texts by name in the section ``Attributes:`` of a docstring."""
    section = (kind.__doc__ or "").partition("Attributes:")[2].partition("\n\n")[0]
    entries = re.split(r"\n        (?=\w+:)|\n    (?=\w+:)", section)
    return {name.strip(): one_line(what) for name, colon, what in (each.partition(":") for each in entries) if colon}

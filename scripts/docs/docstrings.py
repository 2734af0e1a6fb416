"""Docstrings, which are written with Sphinx's roles, as Markdown."""

from __future__ import annotations

import re

_ROLE = re.compile(r":(?:class|meth|func|mod|data|attr|exc):`~?([^`]+)`")


def without_roles(text: str) -> str:
    """``:class:`X``` as ``X``, in backquotes."""
    return _ROLE.sub(r"`\1`", text)

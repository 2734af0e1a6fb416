"""For mkdocstrings: names in Sphinx's roles, which Markdown does not know, are code."""

from __future__ import annotations

from typing import Any

import griffe

from scripts.docs.docstrings import without_roles


class WithoutRoles(griffe.Extension):
    """Changes the text of every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = without_roles(obj.docstring.value)

"""Modules whose names are imported at their first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazily(module: dict[str, Any], homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module.

    Args:
        module: its ``globals()``.
        homes: names, with spaces between them, by the modules that have them; a name may be that of a module in a
            package.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}")
        home = importlib.import_module(home_of[name])
        value = getattr(home, name, None)
        if value is None:
            value = importlib.import_module(f"{home_of[name]}.{name}")
        module[name] = value
        return value

    return find

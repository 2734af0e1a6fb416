"""How refusals are worded: the nearest known name, and what a value is in a user's words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"did you mean 'lr'?"`` when a known name is near, else ``"known are 'a', 'b'"``."""
    names = sorted(known)
    folded = {each.lower(): each for each in names}
    near = difflib.get_close_matches(str(name).lower(), folded, n=1)
    if near:
        return f"did you mean {folded[near[0]]!r}?"
    return "known are " + ", ".join(repr(each) for each in names)


def shown(value: Any) -> str:
    """The value with its type, short enough for one line of an error."""
    text = repr(value)
    if len(text) > 60:
        text = text[:57] + "..."
    return f"{text} ({type(value).__name__})"


def byte_count(count: int) -> str:
    """Bytes in the largest unit of which there is at least one: ``12 B``, ``1.5 KiB``, ``2,048.0 GiB``."""
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB"):
        size /= 1024
        if size < 1023.95:  # what rounds to 1024.0 is 1 of the next unit
            return f"{size:.1f} {unit}"
    return f"{size / 1024:,.1f} GiB"


def is_integer(value: Any) -> bool:
    """An int that is no bool: JSON's ``true`` must not pass for 1."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """An int or a float, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)

"""Functions that format parts of error messages, and that check whether a value is a number."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"did you mean 'lr'?"`` if a known name is similar, otherwise ``"known are 'a', 'b'"``."""
    names = sorted(known)
    folded = {each.lower(): each for each in names}
    near = difflib.get_close_matches(str(name).lower(), folded, n=1)
    if near:
        return f"did you mean {folded[near[0]]!r}?"
    return "known are " + ", ".join(repr(each) for each in names)


def shown(value: Any) -> str:
    """Return the value with its type, short enough for one line of an error."""
    text = repr(value)
    if len(text) > 60:
        text = text[:57] + "..."
    return f"{text} ({type(value).__name__})"


def joined_names(entries: Sequence[str]) -> str:
    """Return up to three entries, and the number of the others."""
    listed = ", ".join(entries[:3])
    return listed if len(entries) <= 3 else f"{listed}, and {len(entries) - 3} more"


def is_integer(value: Any) -> bool:
    """Return whether ``value`` is an int and not a bool: JSON's ``true`` must not pass for 1."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether ``value`` is an int or a float, and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)

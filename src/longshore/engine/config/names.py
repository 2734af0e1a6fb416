"""What somebody may have meant by a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def quoted(value: object) -> str:
    """A name or value as JSON shows it."""
    return f'"{value}"' if isinstance(value, str) else str(value)


def edits(left: str, right: str) -> int:
    """Insertions, deletions, replacements and swaps of neighbours from one to the other."""
    previous: list[int] = []
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        before, previous, row = previous, row, [i]
        for j, b in enumerate(right, 1):
            best = min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                best = min(best, before[j - 2] + 1)
            row.append(best)
    return row[-1]


def candidates(name: object, known: Iterable[str]) -> list[str]:
    """The known names that ``name`` may stand for, the nearest first; all that are equally near."""
    if not isinstance(name, str):
        return []
    given, known = name.lower(), list(known)
    distances = {option: edits(given, option.lower()) for option in known}
    least = min(distances.values(), default=0)
    if known and least <= max(1, len(given) // 4):
        return [option for option in known if distances[option] == least]
    return difflib.get_close_matches(given, known, n=1, cutoff=0.7)


def nearest(name: object, known: Iterable[str]) -> str:
    """``; did you mean ...?``, or nothing."""
    found = candidates(name, known)
    return f"; did you mean {' or '.join(quoted(option) for option in found)}?" if found else ""

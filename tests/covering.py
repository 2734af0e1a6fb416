"""Tables of parameters of which ``make test`` has a few rows, and ``make test-slow`` the others.

``@pytest.mark.covering(2)`` on a test with several ``parametrize``: every two values of different ones meet in a row
that is not slow; with ``covering(1)`` every value is in one.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest


def leave_to_slow(items: list[pytest.Item]) -> None:
    """Mark as slow what the rows before it cover."""
    tables: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("covering") is not None:
            tables[item.nodeid.partition("[")[0]].append(item)
    for rows in tables.values():
        mark = rows[0].get_closest_marker("covering")
        assert mark is not None
        (strength,) = mark.args
        fast = [row for row in rows if row.get_closest_marker("slow") is None]
        for row in set(fast).difference(covering(fast, strength)):
            row.add_marker("slow")


def covering(rows: list[pytest.Function], strength: int) -> list[pytest.Function]:
    """Of these, greedily, as many as it takes; the same ones every time."""
    meetings = {row: _meetings(row, strength) for row in rows}
    missing = set[object]().union(*meetings.values())
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(meetings[row] & missing))
        missing -= meetings[best]
        chosen.append(best)
    return chosen


def _meetings(row: pytest.Function, strength: int) -> set[object]:
    """Of the values in a row. They are told apart by their identity: each is one object in all rows."""
    values = [(name, id(value)) for name, value in sorted(row.callspec.params.items(), key=lambda item: item[0])]
    assert strength <= len(values), row
    return set(itertools.combinations(values, strength))

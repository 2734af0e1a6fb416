"""Tables of parameters of which ``make test`` runs few rows, ``make test-slow`` more, and ``make test-full`` all.

``@pytest.mark.covering(strength)`` on a test with several parameters divides its rows in three:

- ``make test``: rows in which every ``strength`` values of different parameters meet, if they meet in any row;
- ``make test-slow`` (marked ``slow``): with those before, every ``strength + 1`` values;
- ``make test-full`` (marked ``slow`` and ``full``): the others.

A row that is marked ``slow`` by hand is never one of ``make test``, and one that is marked ``full`` in neither. Rows
that ``-m`` leaves out are not made: there are 20,000 of them, and each process would collect them.

``@pytest.mark.quick(strength)`` leaves rows of ``make test`` to ``make test-medium`` (marked ``medium``): all but so
many that every ``strength`` values of different parameters meet in one; with 0 all but one. It is for any test with
parameters, with ``covering`` or without.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest


def make_rows(metafunc: pytest.Metafunc) -> None:
    """Mark the rows of a test with ``covering``, and leave out those that ``-m`` leaves out."""
    marked = metafunc.definition.get_closest_marker("covering")
    if marked is None:
        return
    of_all = {mark.name for mark in metafunc.definition.iter_markers()}

    def has(row: Any, *names: str) -> bool:
        return any(name in of_all or name in {mark.name for mark in row.marks} for name in names)

    every: list[Any] = metafunc._calls
    rows = sorted((row for row in every if not has(row, "full")), key=lambda row: has(row, "slow"))
    if not rows:
        return
    strength, values = marked.args[0], [row.params for row in rows]
    fast = covering([row.params for row in rows if not has(row, "slow")], strength)
    slow = {*fast, *covering(values, min(strength + 1, len(values[0])), fast)}
    for number in set(range(len(rows))).difference(fast):
        rows[number].marks.append(getattr(pytest.mark, "slow" if number in slow else "full").mark)
    chosen = metafunc.config.getoption("markexpr")
    last = "" if " or " in chosen else chosen.split(" and ")[-1]
    if out := {"not slow": ("slow", "full"), "not full": ("full",)}.get(last, ()):
        # Without any row pytest would call the test without arguments.
        every[:] = [row for row in every if not has(row, *out)] or every[:1]


def divide(items: list[pytest.Item]) -> None:
    """Mark the rows of all tests with ``quick``; what is marked ``full`` is ``slow`` as well."""
    for item in items:
        if item.get_closest_marker("full") is not None:
            item.add_marker("slow")
    for strength, rows in _tables(items, "quick"):
        rows = [row for row in rows if row.get_closest_marker("slow") is None]
        chosen = covering([row.callspec.params for row in rows], strength)
        for number in set(range(len(rows))).difference(chosen):
            rows[number].add_marker("medium")


def _tables(items: list[pytest.Item], mark: str) -> list[tuple[int, list[pytest.Function]]]:
    """Return the argument of each test that has a mark, and the test's rows."""
    tables: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker(mark) is not None:
            tables[item.nodeid.partition("[")[0]].append(item)
    found = [(rows[0].get_closest_marker(mark), rows) for rows in tables.values()]
    return [(marked.args[0], rows) for marked, rows in found if marked is not None]


def covering(rows: Sequence[Mapping[str, Any]], strength: int, chosen: Iterable[int] = ()) -> list[int]:
    """Numbers of few rows in which every ``strength`` values of different columns meet, if they meet in any row.

    Each is the row with the most meetings that are still missing, the first of several: the same every time.

    Args:
        rows: each a value by column. Values are told apart by identity: a value is one object in all rows.
        strength: how many values meet.
        chosen: rows that are there anyway; they are not among those returned.
    """
    meetings = [_meetings(row, strength) for row in rows]
    missing = set[object]().union(*meetings).difference(*(meetings[number] for number in chosen))
    # Meetings only become fewer: a row whose number is up to date and still the largest is the best of all.
    bounds = [(-len(each), number) for number, each in enumerate(meetings)]
    heapq.heapify(bounds)
    found = []
    while missing:
        _, number = heapq.heappop(bounds)
        entry = (-len(meetings[number] & missing), number)
        if bounds and entry > bounds[0]:
            heapq.heappush(bounds, entry)
        else:
            missing -= meetings[number]
            found.append(number)
    return found


def _meetings(row: Mapping[str, Any], strength: int) -> set[object]:
    values = [(name, id(value)) for name, value in sorted(row.items(), key=lambda item: item[0])]
    assert strength <= len(values), row
    return set(itertools.combinations(values, strength))

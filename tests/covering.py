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

``--share 0.25 --share-of TEXT`` leaves a quarter of the rows that are not in ``make test``, other ones for each text,
and all rows of the tests of the files that ``--whole`` names, which are those that ``tests/README.md`` has for them in
its first two columns.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import pytest


def make_rows(metafunc: pytest.Metafunc) -> None:
    """Mark the rows of a test, and leave out those that ``-m`` leaves out."""
    every: list[Any] = metafunc._calls
    of_all = {mark.name for mark in metafunc.definition.iter_markers()}

    def has(row: Any, *names: str) -> bool:
        return any(name in of_all or name in {mark.name for mark in row.marks} for name in names)

    def strength(mark: str) -> int | None:
        found = metafunc.definition.get_closest_marker(mark)
        return None if found is None else found.args[0]

    out = _left_out(metafunc.config.getoption("markexpr"))
    rows = sorted((row for row in every if not has(row, "full")), key=lambda row: has(row, "slow"))
    if rows and (meeting := strength("covering")) is not None:
        values = [row.params for row in rows]
        fast = covering([row.params for row in rows if not has(row, "slow")], meeting)
        # Which of the others are slow and which full takes seconds, and does not matter where neither is made.
        slow = set[int]() if "slow" in out else {*covering(values, min(meeting + 1, len(values[0])), fast)}
        for number in set(range(len(rows))).difference(fast):
            rows[number].marks.append(getattr(pytest.mark, "slow" if number in slow else "full").mark)
    rows = [row for row in every if not has(row, "slow", "full")]
    if rows and (meeting := strength("quick")) is not None:
        for number in set(range(len(rows))).difference(covering([row.params for row in rows], meeting)):
            rows[number].marks.append(pytest.mark.medium.mark)
    if out:
        # Without any row pytest would call the test without arguments.
        every[:] = [row for row in every if not has(row, *out)] or every[:1]


def _left_out(expression: str) -> set[str]:
    """The levels of which ``-m`` takes no row."""
    words = re.sub(r"\([^()]*\)", "", expression)
    if " or " in words or "(" in words:
        return set()
    found = {
        clause.strip().removeprefix("not ") for clause in words.split(" and ") if clause.strip().startswith("not ")
    }
    return (found | {"full"} if "slow" in found else found) & {"medium", "slow", "full"}


def divide(items: list[pytest.Item]) -> None:
    """What is marked ``full`` is ``slow`` as well."""
    for item in items:
        if item.get_closest_marker("full") is not None:
            item.add_marker("slow")


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--share", type=float, default=1.0, help="so much of each test's rows that are medium or slow")
    parser.addoption("--share-of", metavar="TEXT", default="", help="which rows, follows from the text")
    parser.addoption("--whole", metavar="FILES", default="", help="all rows of the tests of these files, one a word")


def draw(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave what the options say of the tests, whose levels are marked."""
    share, text = config.getoption("--share"), config.getoption("--share-of")
    if share >= 1.0:
        return
    whole = {file for name in config.getoption("--whole").split() for file in about(name)}
    tests: dict[tuple[str, bool], list[str]] = defaultdict(list)
    kept = set[str]()
    for item in items:
        slow = item.get_closest_marker("slow") is not None
        file, test = item.nodeid.partition("::")[0], item.nodeid.partition("[")[0]
        if file in whole or not (slow or item.get_closest_marker("medium") is not None):
            kept.add(item.nodeid)
        else:
            tests[test, slow].append(item.nodeid)
    for rows in tests.values():
        kept |= drawn(rows, share, text)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


def drawn(rows: Sequence[str], share: float, text: str) -> set[str]:
    """Return ``share`` of the rows; of a single row, each text that many times. All are drawn equally often."""

    def number(*words: str) -> int:
        return int.from_bytes(hashlib.sha256(" ".join((text, *words)).encode()).digest()[:8], "big")

    count = int(share * len(rows) + number("how many of", rows[0]) / 2**64)
    return set(sorted(rows, key=number)[:count])


def about(name: str) -> set[str]:
    """Return the files with the tests of a source file (that of its name, and those that its mutants have to fail), or
    of cases that run on ranks, and the file itself."""
    from scripts.docs import tests_page  # which a copy of the tests alone does without

    file = PurePosixPath(name)
    if not file.is_relative_to("src/longshore"):
        return {name, (file.parent / f"test_{file.stem.removesuffix('_cases')}.py").as_posix()}
    source = file.relative_to("src/longshore").as_posix()
    found = {*tests_page.tests_by_mutant().get(source, ()), tests_page.mirror_of(source)} - {None}
    return {name, *(f"tests/{each}" for each in found)}


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

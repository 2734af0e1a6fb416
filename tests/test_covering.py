"""Which rows of a table are whose."""

from __future__ import annotations

import itertools

import pytest

TABLE = """
import pytest


@pytest.mark.parametrize("c", range(3))
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("a", range(3))
{marks}
def test_cell(a, b, c):
    pass
"""

CONFTEST = """
import pytest
from covering import divide, make_rows


def pytest_configure(config):
    for name in ("covering", "quick", "medium", "slow", "full"):
        config.addinivalue_line("markers", name)


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc):
    yield
    make_rows(metafunc)


def pytest_collection_modifyitems(items):
    divide(items)
"""


def rows(pytester: pytest.Pytester, chosen: str, *marks: str) -> set[tuple[str, ...]]:
    """The values of the rows that ``-m`` leaves."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_table=TABLE.format(marks="\n".join(marks)))
    passed, _, _ = pytester.inline_run("-m", chosen).listoutcomes()
    return {tuple(report.nodeid.partition("[")[2].rstrip("]").split("-")) for report in passed}


def meet(found: set[tuple[str, ...]], strength: int) -> int:
    """How many meetings of so many values of different parameters are in the rows."""
    return len({each for row in found for each in itertools.combinations(enumerate(row), strength)})


COVERING = "@pytest.mark.covering(2)"


@pytest.mark.medium
@pytest.mark.parametrize(("strength", "meetings", "most"), [(0, 1, 1), (1, 9, 5)])
def test_few_rows_are_quick(pytester: pytest.Pytester, strength: int, meetings: int, most: int) -> None:
    marks = COVERING, f"@pytest.mark.quick({strength})"
    quick = rows(pytester, "not medium and not slow", *marks)
    assert meet(quick, strength) == meetings and len(quick) <= most
    medium = rows(pytester, "medium", *marks)
    assert not quick & medium and quick | medium == rows(pytester, "not slow", COVERING)
    assert rows(pytester, "slow", *marks) == rows(pytester, "slow", COVERING)


def test_rows_of_a_test_that_is_no_table_are_medium(pytester: pytest.Pytester) -> None:
    quick, medium = (rows(pytester, each, "@pytest.mark.quick(1)") for each in ("not medium", "medium"))
    assert len(quick) == 3 and len(medium) == 24 and meet(quick, 1) == 9


def test_tables(pytester: pytest.Pytester) -> None:
    quick, more = (rows(pytester, chosen, COVERING) for chosen in ("not slow", "not full"))
    assert meet(quick, 2) == 27 and len(quick) < 15
    assert meet(more, 3) == len(more) == len(rows(pytester, "", COVERING)) == 27
    assert not rows(pytester, "medium", COVERING)


def test_rows_that_are_full_are_slow(pytester: pytest.Pytester) -> None:
    full, slow, more = (rows(pytester, each, "@pytest.mark.covering(1)") for each in ("full", "slow", "not full"))
    assert full and full < slow and meet(more, 2) == 27

"""Which rows of a table are whose."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from covering import about, drawn

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
from covering import add_options, divide, draw, make_rows


def pytest_addoption(parser):
    add_options(parser)


def pytest_configure(config):
    for name in ("covering", "quick", "medium", "slow", "full", "gpu"):
        config.addinivalue_line("markers", name)


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc):
    yield
    make_rows(metafunc)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    divide(items)
    draw(config, items)
"""


def rows(pytester: pytest.Pytester, chosen: str, *marks: str, options: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """The values of the rows that ``-m`` leaves."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_table=TABLE.format(marks="\n".join(marks)))
    passed, _, _ = pytester.inline_run("-m", chosen, *options).listoutcomes()
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


@pytest.mark.parametrize(
    ("chosen", "marks", "made"),
    [
        ("not slow", [], 27),
        ("not slow", ["@pytest.mark.covering(1)"], 3),
        ("(gpu or not slow) and not slow", ["@pytest.mark.covering(1)"], 3),
        ("not medium and not slow", ["@pytest.mark.quick(1)"], 3),
        ("not slow", ["@pytest.mark.quick(1)"], 27),
        ("not medium and not slow", ["@pytest.mark.medium"], 1),  # pytest makes one in any case
        ("gpu or not slow", ["@pytest.mark.covering(1)"], 27),
    ],
)
def test_rows_that_are_left_out_are_not_made(
    pytester: pytest.Pytester, chosen: str, marks: list[str], made: int
) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_table=TABLE.format(marks="\n".join(marks)))
    items, _ = pytester.inline_genitems("-m", chosen)
    assert len(items) == made


def test_rows_that_are_full_are_slow(pytester: pytest.Pytester) -> None:
    full, slow, more = (rows(pytester, each, "@pytest.mark.covering(1)") for each in ("full", "slow", "not full"))
    assert full and full < slow and meet(more, 2) == 27


def share(text: str, *more: str) -> tuple[str, ...]:
    return "--share", "0.25", "--share-of", text, *more


def test_a_share_is_of_what_is_not_quick(pytester: pytest.Pytester) -> None:
    quick = "@pytest.mark.quick(1)"
    whole = rows(pytester, "not slow", quick)
    found = [rows(pytester, "not slow", quick, options=share(text)) for text in ("a", "b")]
    assert [len(each) for each in found] == [3 + 6, 3 + 6] and meet(found[0] & found[1], 1) == 9
    assert found[0] != found[1] and found[0] | found[1] < whole
    again, medium = (rows(pytester, each, quick, options=share("a")) for each in ("not slow", "medium"))
    assert again == found[0] and medium < again and len(medium) == 6


@pytest.mark.parametrize(
    ("files", "whole"),
    [
        ("README.md tests/test_table.py", False),
        ("src/longshore/layout/table.py", False),
        ("README.md test_table.py", True),
        ("table_cases.py", True),
    ],
)
def test_files_that_are_named_keep_all_rows(pytester: pytest.Pytester, files: str, whole: bool) -> None:
    found = rows(pytester, "medium", "@pytest.mark.medium", options=share("a", "--whole", files))
    assert len(found) == 27 if whole else 6 <= len(found) <= 7


@pytest.mark.parametrize("count", [1, 2, 7])
def test_each_row_is_drawn_as_often_as_the_others(count: int) -> None:
    """A quarter of them: a single row with every fourth text."""
    names = [f"test_a[{number}]" for number in range(count)]
    found = [drawn(names, 0.25, text) for text in map(str, range(800))]
    assert {len(each) for each in found} <= {count // 4, count // 4 + 1}
    times = Counter(name for each in found for name in each)
    assert set(times) == set(names) and all(160 <= time <= 240 for time in times.values()), times


def test_where_the_tests_of_a_file_are() -> None:
    assert about("src/longshore/transfer/runner.py") >= {
        "tests/transfer/test_runner.py",
        "tests/ranks/test_unfinished.py",
    }
    assert about("src/longshore/optim/members.py") >= {
        "tests/optim/test_laid_out_anew.py",
        "tests/optim/test_groups.py",
    }
    assert about("src/longshore/compat/config/table.py") >= {"tests/compat/config/test_table.py"}
    assert about("tests/engine/gather_cases.py") >= {"tests/engine/test_gather.py"}
    assert about("tests/tiles/test_states.py") >= {"tests/tiles/test_states.py"}
    assert about("README.md") == {"README.md", "test_README.py"}

"""The list of mutants does not rot: each still has something to change, and tests to catch it."""

from __future__ import annotations

import ast
from collections import Counter

import pytest
from mutants import MUTANTS, ROOT, Mutant

BY_NAME = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)


@BY_NAME
def test_a_mutant_changes_one_place_and_is_code(mutant: Mutant) -> None:
    text = (ROOT / "src" / "longshore" / mutant.file).read_text()
    mutated = mutant.applied_to(text)  # raises where its source text does not occur exactly once
    assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(text))


@BY_NAME
def test_a_mutants_tests_are_there(mutant: Mutant) -> None:
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / file).read_text()


def test_names_are_told_apart() -> None:
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []
    assert len(MUTANTS) >= 40


@pytest.mark.parametrize("text", ["", "a wait\n", "wait(); wait()"])
def test_a_text_that_is_not_found_once_is_an_error(text: str) -> None:
    mutant = Mutant("not waited for", "host/x.py", "wait()", "pass", ("tests/host",))
    assert mutant.applied_to("x.wait()") == "x.pass"
    with pytest.raises(ValueError, match=r"'not waited for' occurs [02] times in src/longshore/host/x\.py"):
        mutant.applied_to(text)

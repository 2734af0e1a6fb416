"""The list of mutants does not rot: each still has something to change, and tests to catch it."""

from __future__ import annotations

import ast
import re
import signal
from collections import Counter

import pytest
from mutants import MUTANTS, Mutant
from mutants import mutant as mutant_module
from mutants.__main__ import ON_DEVICE, Outcome, Player, main
from mutants.mutant import ROOT, Function, functions_of, what_does_not_apply


@pytest.mark.medium
def test_every_mutant_changes_one_place_is_code_and_has_tests() -> None:
    stale = what_does_not_apply(MUTANTS)
    assert not stale, "\n".join(["mutants that no longer apply:", *stale])
    assert all(mutant.tests for mutant in MUTANTS)


def test_names_are_told_apart() -> None:
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []
    assert len(MUTANTS) >= 250


FILE = '''\
"""Waits."""
LIMIT = 3


class Copy:
    limit = 2

    @property
    def done(self) -> bool:
        return self.event.query()  # without a wait

    def wait(
        self, event: int
    ) -> None:
        """Wait for the event."""
        if (self.limit
                > LIMIT):
            self.event.wait(event)
        self.event.wait(event)


if LIMIT:
    def early():
        return LIMIT


def wait(copies):
    def one(copy):
        copy.wait("here")
    for copy in copies:
        one(copy)
'''


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of two files, of which one has a function of the other, too."""
    found: dict[str, list[Function]] = {}
    for text, file in ((FILE, "a.py"), ("def wait(copies):\n    pass\n", "b.py")):
        for name, each in functions_of(text, file):
            found.setdefault(name, []).append(each)
    monkeypatch.setattr(mutant_module, "functions", lambda: found)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("function", "source", "replacement", "before", "after"),
    [
        ("Copy.wait", "if self.limit > LIMIT:", "if True:", "if (self.limit\n                > LIMIT)", "if True"),
        (
            "Copy.wait",
            "if self.limit > LIMIT:\n    self.event.wait(event)\nself.event.wait(event)",
            "pass",
            None,
            "pass",
        ),
        ("Copy.wait", "self.limit > LIMIT", "self.limit >= LIMIT", None, "if self.limit >= LIMIT:"),
        ("Copy.done", "@property", "", "@property", None),
        ("Copy", "limit = 2", "limit = 3", "limit = 2", "limit = 3"),
        ("", "LIMIT = 3", "LIMIT = 4", "LIMIT = 3", "LIMIT = 4"),
        ("wait", "copy.wait('here')", "pass", 'copy.wait("here")', "pass"),
        ("early", "return LIMIT", "return 0", None, "return 0"),
        ("wait", "for copy in copies:", "for copy in copies[1:]:", "in copies:", "in copies[1:]:"),
    ],
)
def test_a_statement_is_found_wherever_and_however_it_is_written(
    function: str, source: str, replacement: str, before: str | None, after: str | None
) -> None:
    mutant = Mutant("m", function, source, replacement, ("tests",))
    assert mutant.file == "a.py"
    mutated = mutant.applied_to(FILE)
    ast.parse(mutated)
    assert before is None or (before in FILE and before not in mutated)
    assert after is None or after in mutated
    untouched = [name for name, _ in functions_of(FILE, "") if name != function]
    after_it = dict(functions_of(mutated, ""))
    assert all(after_it[name].text == dict(functions_of(FILE, ""))[name].text for name in untouched)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("function", "source", "said"),
    [
        ("Copy.wait", "self.event.wait(event)", "2 times in 1 functions"),
        ("Copy.wait", "return", "0 times in 1 functions"),
        ("Copy.waits", "pass", "0 times in 0 functions"),
        ("wait", "copies", "3 times in 2 functions"),
        ("Copy.wait", "Wait for the event.", "0 times in 1 functions"),
    ],
)
def test_a_statement_that_is_not_found_once_is_an_error(function: str, source: str, said: str) -> None:
    mutant = Mutant("not waited for", function, source, "...", ("tests",))
    with pytest.raises(ValueError, match=f"'not waited for' occurs {said} with the name {function}: write it anew"):
        _ = mutant.file


def test_what_no_longer_applies_is_said_of_each() -> None:
    function, source, here = "align", "return", ("tests/test_mutants.py",)
    mutants = [
        Mutant("of a lost test", function, source, "", ("tests/test_mutants.py::test_lost",)),
        Mutant("of a lost function", "lost", source, "", here),
        Mutant("of a lost statement", function, "no such statement", "", here),
        Mutant("no code", "TileRun", "tiles: int", "tiles: :", here),
        Mutant("no change", "TileRun", "tiles: int", "tiles: int  # changed", here),
    ]
    said = what_does_not_apply(mutants)
    assert [line.partition(": ")[0] for line in said] == [mutant.name for mutant in mutants]
    assert said[0].endswith("there is no tests/test_mutants.py::test_lost")
    assert "0 times in 0 functions with the name lost" in said[1]
    assert "occurs 0 times in 1 functions" in said[2]
    assert said[4].endswith("it changes nothing")


def test_what_runs_on_the_simulated_device_is_in_make_test() -> None:
    makefile = (ROOT / "Makefile").read_text()
    quick = re.search(r"^QUICK := (.*)$", makefile, re.MULTILINE)
    target = re.search(r"^ON_DEVICE := --simulated-device ((?:.*\\\n)*.*)$", makefile, re.MULTILINE)
    assert quick is not None and target is not None
    assert (
        f"(simulated or gpu) and {quick[1]}" == ON_DEVICE
        and '-m "(simulated or gpu) and $(QUICK)" $(ON_DEVICE)' in makefile
    )
    places = tuple(target[1].replace("\\", "").split())
    tests = {test.partition("::")[0] for mutant in MUTANTS if mutant.on_device for test in mutant.tests}
    assert [test for test in sorted(tests) if not test.startswith(places)] == []


@pytest.mark.parametrize(
    "code, end, rc",
    [
        (1, "caught", 0),
        (None, "caught, hangs", 0),
        (-signal.SIGSEGV, "caught, crashes", 0),
        (0, "SURVIVED", 1),
        (5, "pytest ended with 5", 1),  # no test was collected
        (-signal.SIGKILL, "pytest ended with -9", 1),  # for want of memory, say
    ],
)
def test_how_a_mutant_ends(
    code: int | None, end: str, rc: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Player, "play", lambda *_: Outcome(code, 1.0, ""))
    assert main(["a pass is harvested twice"]) == rc
    assert capsys.readouterr().out.startswith(f"{end}: tiles/speculation.py: a pass is harvested twice (1 s)")

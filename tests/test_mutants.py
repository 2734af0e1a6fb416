"""The list of mutants does not rot: each still has something to change, and tests to catch it."""

from __future__ import annotations

import re
import signal
from collections import Counter

import pytest
from mutants import MUTANTS, Mutant
from mutants.__main__ import ON_DEVICE, Outcome, Player, main
from mutants.mutant import ROOT, what_does_not_apply


@pytest.mark.medium
def test_every_mutant_changes_one_place_is_code_and_has_tests() -> None:
    stale = what_does_not_apply(MUTANTS)
    assert not stale, "\n".join(["mutants that no longer apply:", *stale])
    assert all(mutant.tests for mutant in MUTANTS)


def test_names_are_told_apart() -> None:
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []
    assert len(MUTANTS) >= 250


@pytest.mark.parametrize("text", ["", "a wait\n", "wait(); wait()"])
def test_a_text_that_is_not_found_once_is_an_error(text: str) -> None:
    mutant = Mutant("not waited for", "tiles/x.py", "wait()", "pass", ("tests/tiles",))
    assert mutant.applied_to("x.wait()") == "x.pass"
    with pytest.raises(ValueError, match=r"'not waited for' occurs [02] times in src/longshore/tiles/x\.py"):
        mutant.applied_to(text)


def test_what_no_longer_applies_is_said_of_each() -> None:
    source, here = '"""The list of mutants', ("tests/test_mutants.py",)
    mutants = [
        Mutant("of a lost test", "layout.py", source, "", ("tests/test_mutants.py::test_lost",)),
        Mutant("of a lost file", "lost.py", source, "", here),
        Mutant("of lost text", "layout.py", "no such text", "", here),
        Mutant("no code", "layout.py", "import annotations\n", "import\n", here),
        Mutant("no change", "layout.py", "import annotations\n", "import annotations  # changed\n", here),
    ]
    said = what_does_not_apply(mutants)
    assert [line.partition(": ")[0] for line in said] == [mutant.name for mutant in mutants]
    assert said[0].endswith("there is no tests/test_mutants.py::test_lost")
    assert "there is no src/longshore/lost.py" in said[1]
    assert "occurs 0 times" in said[2]
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

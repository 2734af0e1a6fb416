"""The last line of ``python -m benchmarks``, and how it ends."""

from __future__ import annotations

import pytest
import typer

from benchmarks import __main__ as command
from benchmarks.__main__ import Part
from benchmarks.child import PartFailed
from benchmarks.report import Row, at_least


def measured(quick: bool, threads: int, python: str) -> tuple[object, list[Row]]:
    return {}, [at_least("engine", "speed", 1.0, "x", goal=2.0), at_least("engine", "size", 2.0, "x", goal=1.0)]


def fails(quick: bool, threads: int, python: str) -> tuple[object, list[Row]]:
    raise PartFailed("plan failed with status 1; its message is above")


@pytest.fixture(autouse=True)
def _parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_MEASURE", {Part.engine: measured, Part.plan: fails})


def test_goals_that_are_missed_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    command.main([Part.engine], threads=1)
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 goals missed; ")


@pytest.mark.parametrize("quick, judged", [(True, "--quick: "), (False, "1 goals missed; not measured: all of plan; ")])
def test_a_part_that_did_not_run_is_a_failure(quick: bool, judged: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        command.main([Part.engine, Part.plan], quick, threads=1)
    assert ended.value.exit_code == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"FAILED, did not run: plan; {judged}")

"""``make test-versions``: which pairs, which interpreters, what the table says, and that it ends as it should."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from longshore.torch_versions import FEATURES, text_of
from scripts import check_versions
from scripts.check_versions import MATRIX, ROOT, Pair, Result, Runner, StepError, pairs_of

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(check_versions, "FOLDER", tmp_path / "versions")
    return tmp_path / "versions"


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


# -- which pairs ----------------------------------------------------------------


def test_the_matrix_has_what_the_package_claims() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    claimed = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    assert sorted(claimed) == sorted({python for python, _ in MATRIX})
    oldest = text_of(FEATURES["longshore"].oldest)
    assert f'"torch>={oldest}"' in text and MATRIX[0][1] == oldest
    assert {text_of(feature.oldest) for feature in FEATURES.values()} <= {torch for _, torch in MATRIX}
    assert f"torch=={MATRIX[-1][1]}." in (ROOT / "constraints.txt").read_text()


def test_the_quick_selection_is_there() -> None:
    assert all((ROOT / path).exists() for path in check_versions.QUICK)


def test_pairs_are_sorted_by_number() -> None:
    assert pairs_of([], []) == [Pair(*row) for row in MATRIX]
    assert pairs_of(["3.12"], []) == [Pair("3.12", "2.10"), Pair("3.12", "2.11")]
    assert pairs_of([], ["2.8"]) == [Pair("3.10", "2.8")]
    both = [Pair("3.10", "2.9"), Pair("3.12", "2.9"), Pair("3.10", "2.10"), Pair("3.12", "2.10")]
    assert pairs_of(["3.12", "3.10"], ["2.10", "2.9"]) == both


def test_an_interpreter_is_one_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shims of pyenv are on the PATH, and fail where their version is switched off."""
    shim = program(tmp_path / "shims" / "python3.77", "echo 'command not found' >&2; exit 127")
    real = program(tmp_path / "bin" / "python3.77", "echo 3.77")
    monkeypatch.setenv("PATH", f"{shim.parent}:{os.environ['PATH']}")
    assert check_versions.interpreter("3.77") is None
    monkeypatch.setenv("PATH", f"{shim.parent}:{real.parent}:{os.environ['PATH']}")
    assert check_versions.interpreter("3.77") == str(real)
    assert check_versions.interpreter(HERE, [str(real), sys.executable]) == sys.executable


def test_the_whole_suite_is_for_the_ends_of_what_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def selections(*arguments: str) -> list[str]:
        return [row.selection for row in check_versions.results_of(check_versions._options(arguments))]

    monkeypatch.setattr(check_versions, "interpreter", lambda version, _: None if version == "3.14" else "python")
    rows = ["whole", *["quick"] * (len(MATRIX) - 3), "whole", "quick"]
    assert MATRIX[-1][0] == "3.14" and selections() == rows
    assert selections("--quick") == ["quick"] * len(MATRIX)
    assert selections("--whole") == ["whole"] * len(MATRIX)
    with pytest.raises(StepError, match="no such pair"):
        selections("--torch", "1.0")
    with pytest.raises(StepError, match=r"--python /nowhere/python is no interpreter that runs here"):
        selections("--python", "/nowhere/python")


# -- running --------------------------------------------------------------------


REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="one" /><testcase classname="tests.a" name="two" />
<testcase classname="tests.a" name="three"><skipped message="needs an accelerator" /></testcase>
<testcase classname="tests.b" name="four"><failure message="no" /></testcase>
<testcase classname="tests.b" name="five"><error message="no" /></testcase>
</testsuite></testsuites>"""


def row_of(report: str, selection: str = "quick") -> Result:
    row = Result(Pair("3.10", "2.8"), selection, "Python 3.10.1, torch 2.8.0", seconds=90)
    check_versions.count(ElementTree.ElementTree(ElementTree.fromstring(report)), row)
    return row


def test_the_table() -> None:
    good = "<testsuites><testcase classname='tests.a' name='one' /></testsuites>"
    absent = Result(Pair("3.14", "2.13"), "quick", problem="there is no python3.14 on the PATH", missing=True)
    rows = [row_of(REPORT), row_of(good, "whole"), absent]
    assert list(check_versions.table(rows))[2:] == [
        "| Python 3.10.1, torch 2.8.0 | quick | 2 | 2 | 1 | 1.5 |",
        "| Python 3.10.1, torch 2.8.0 | whole | 1 | 0 | 0 | 1.5 |",
        "| 3.14, 2.13 | quick | not run: there is no python3.14 on the PATH | | | |",
        "FAILED on py3.10-torch2.8: tests.b::four",
        "FAILED on py3.10-torch2.8: tests.b::five",
    ]
    assert list(check_versions.skips(rows)) == ["py3.10-torch2.8:     1 skipped: needs an accelerator"]
    assert [row.good for row in rows] == [False, True, True]
    assert not row_of("<testsuites />").good  # that nothing was run is no success


def test_a_missing_interpreter_is_told_and_is_no_success_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_versions, "interpreter", lambda *_: None)
    assert check_versions.main(["--torch", "2.8"]) == 1
    assert "NOT RUN: there is no python3.10 on the PATH" in capsys.readouterr().out


@pytest.mark.parametrize("keep", [[], ["--keep"]])
@pytest.mark.parametrize("report, code", [(REPORT, 1), (REPORT.replace("failure", "x").replace("error", "x"), 0)])
def test_a_pair(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    report: str,
    code: int,
    keep: list[str],
) -> None:
    """With an environment whose pytest writes this report."""

    def install(pair: Pair, path: str, environment: Path, *others: object) -> None:
        written = folder / f"{pair.name}.xml"
        script = f'case "$*" in *pytest*) echo ". [ 50%]"; cat > {written} <<E\n{report}\nE\n;; *) echo Python 3;; esac'
        program(environment / "bin" / "python", script)

    monkeypatch.setattr(check_versions, "install", install)
    assert check_versions.main(["--python", sys.executable, "--torch", "2.8", "--quick", *keep]) == code
    said = capsys.readouterr().out
    assert f"py{HERE}-torch2.8: 50 % of the tests" in said
    assert "| Python 3 | quick | " in said and ("FAILED on" in said) is (code == 1)
    assert (folder / f"py{HERE}-torch2.8").exists() is bool(keep)


def test_a_step_that_fails_says_where_its_output_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = program(folder / "python", f'case "$*" in *venv*) echo no space; exit 3;; *) echo {HERE};; esac')
    assert check_versions.main(["--python", str(path), "--torch", "2.8"]) == 1
    log = folder / f"py{HERE}-torch2.8.log"
    assert f"making the environment failed with exit code 3; see {log}" in capsys.readouterr().out
    assert "no space" in log.read_text()


def runs(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"  # ended, and nobody has asked for its exit code


def test_wheels_that_are_there_are_taken(tmp_path: Path) -> None:
    runner = Runner(tmp_path / "log")
    for name in ("longshore-0.1.0-cp310-cp310-linux_x86_64.whl", "longshore-0.1.0-cp312-abi3-linux_x86_64.whl"):
        (tmp_path / name).touch()
    for python, name in (("3.10", "cp310-cp310"), ("3.12", "cp312-abi3"), ("3.14", "cp312-abi3")):
        assert name in check_versions._wheel(Pair(python, "2.13"), tmp_path, tmp_path, runner).name
    with pytest.raises(StepError, match=r"has no wheel for Python 3\.11: longshore-\*-cp311-\*\.whl"):
        check_versions._wheel(Pair("3.11", "2.13"), tmp_path, tmp_path, runner)
    assert not (tmp_path / "log").exists()  # nothing was run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_what_was_started(tmp_path: Path, number: signal.Signals) -> None:
    pid = tmp_path / "pid"
    path = program(
        tmp_path / "python",
        f'case "$*" in *venv*) mkdir -p {tmp_path}/py{HERE}-torch2.8; sleep 1000 & echo $! > {pid}; wait;; '
        f"*) echo {HERE};; esac",
    )
    code = (
        "import signal, sys; from pathlib import Path; from scripts import check_versions\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"check_versions.FOLDER = Path({str(tmp_path)!r})\n"
        f"sys.exit(check_versions.main(['--python', {str(path)!r}, '--torch', '2.8']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    while not (pid.exists() and pid.read_text()):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130, said
    assert "interrupted" in said
    assert not (tmp_path / f"py{HERE}-torch2.8").exists()
    until = time.monotonic() + 10  # a process that was sent a signal ends when it is scheduled next
    while runs(int(pid.read_text())):
        assert time.monotonic() < until
        time.sleep(0.02)

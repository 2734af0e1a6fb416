"""Run the tests on several versions of torch and Python: ``python -m scripts.check_versions`` (``make test-versions``).

Each pair gets an environment in ``build/versions``, with torch of that version, longshore built from these sources, and
what the extra ``test`` requires. It runs the quick selection there, or the whole suite on the oldest and the newest
pair, and removes the environment. An interpreter that is not on the PATH is told in the table.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "versions"

MATRIX = (
    ("3.10", "2.8"),
    ("3.11", "2.9"),
    ("3.12", "2.10"),
    ("3.12", "2.11"),
    ("3.13", "2.12"),
    ("3.11", "2.13"),
    ("3.14", "2.13"),
)
"""Each torch and each Python, from the oldest pair to the newest; the product of both would be 30."""

QUICK = (
    "tests/parity",  # each optimizer beside plain PyTorch
    "tests/optim/test_muon.py",
    "tests/engine/test_initialize.py",
    "tests/engine/test_ranks.py",  # every stage, on two ranks
    "tests/engine/test_fully_sharded.py",
    "tests/checkpoint",  # those of earlier releases too
)

Say = Callable[[str], None]


class StepError(Exception):
    """An environment could not be made, or tests could not begin; the message says where the output is."""


@dataclass(frozen=True)
class Pair:
    """A version of Python and one of torch."""

    python: str
    torch: str

    @property
    def name(self) -> str:
        return f"py{self.python}-torch{self.torch}"

    @property
    def age(self) -> tuple[list[int], list[int]]:
        """What pairs are sorted by."""
        return [int(n) for n in self.torch.split(".")], [int(n) for n in self.python.split(".")]


@dataclass
class Result:
    """A row of the table."""

    pair: Pair
    selection: str
    found: str = ""
    """The full versions that were run."""
    counts: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    """Number of tests by reason."""
    seconds: float = 0.0
    problem: str = ""
    """Why nothing was run."""
    missing: bool = False
    """No such interpreter is here, and nothing else is wrong."""

    @property
    def good(self) -> bool:
        return self.missing or (not self.problem and not self.failed and self.counts.get("passed", 0) > 0)


# -- which pairs ----------------------------------------------------------------


def pairs_of(pythons: Sequence[str], torches: Sequence[str]) -> list[Pair]:
    """Return the pairs to run, oldest first: the matrix, its rows with what is named, or all pairs of both that are."""
    if pythons and torches:
        chosen = [(python, torch) for python in pythons for torch in torches]
    else:
        chosen = [row for row in MATRIX if row[0] in (pythons or (row[0],)) and row[1] in (torches or (row[1],))]
    return sorted((Pair(*row) for row in chosen), key=lambda pair: pair.age)


def version_of(program: str) -> str | None:
    """Return ``3.12`` of an interpreter; None if it cannot be run, like the shim of a version that is switched off."""
    try:
        done = subprocess.run(
            [program, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def interpreter(version: str, programs: Sequence[str] = ()) -> str | None:
    """Return an interpreter of a version: one of ``programs``, or pythonX.Y of any folder on the PATH."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    found = (shutil.which(f"python{version}", path=folder) for folder in folders)
    for program in (*programs, *filter(None, found)):
        if version_of(program) == version:
            return program
    return None


# -- one pair -------------------------------------------------------------------


class Runner:
    """Runs commands with their output in a file, and ends them with everything that they started."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def run(self, command: Sequence[str | Path], see: Callable[[str], None] = lambda _: None) -> int:
        """Run a command and return its exit code; ``see`` is told each line."""
        words = [str(word) for word in command]
        with self.log.open("a") as log:
            print(f"$ {' '.join(words)}", file=log, flush=True)
            # A session of its own: Ctrl-C comes to this process alone, which then ends them all.
            with subprocess.Popen(
                words,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            ) as process:
                try:
                    assert process.stdout is not None
                    for line in process.stdout:
                        log.write(line)
                        log.flush()
                        see(line)
                    return process.wait()
                except BaseException:
                    _end(process)
                    raise

    def need(self, command: Sequence[str | Path], what: str) -> None:
        """Run a command; StepError if it fails."""
        if code := self.run(command):
            raise StepError(f"{what} failed with exit code {code}; see {_shown(self.log)}")


def _end(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=10)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def install(pair: Pair, program: str, folder: Path, wheels: Path | None, runner: Runner, say: Say) -> None:
    """Make the environment of a pair, or complete one that was kept."""
    runner.need([program, "-m", "venv", folder], "making the environment")
    constraints = folder / "constraints.txt"
    pinned = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("torch==")]
    constraints.write_text("\n".join([f"torch=={pair.torch}.*", *pinned, ""]))
    # Gigabytes that are used once: no cache.
    pip = [folder / "bin" / "python", "-m", "pip", "--no-cache-dir", "install", "-q", "-c", constraints]
    say(f"{pair.name}: installs torch {pair.torch}")
    runner.need([*pip, "torch"], f"installing torch {pair.torch}")
    say(f"{pair.name}: installs longshore and what its tests need")
    wheel = _wheel(pair, folder, wheels, runner)
    # In an environment that was kept, pip would take another build of the same version for this one.
    runner.need([folder / "bin" / "python", "-m", "pip", "uninstall", "-q", "-y", "longshore"], "removing longshore")
    runner.need([*pip, f"longshore[train,test] @ {wheel.as_uri()}"], "installing longshore")


def _wheel(pair: Pair, folder: Path, wheels: Path | None, runner: Runner) -> Path:
    """Return the wheel for a Python: one of those in ``wheels``, or else of these sources, built once in each run."""
    minor = int(pair.python.split(".")[1])
    pattern = "longshore-*-abi3-*.whl" if minor >= 12 else f"longshore-*-cp3{minor}-*.whl"  # wheel.py-api of pyproject
    here = wheels or FOLDER / f"wheels-{os.getpid()}"
    if wheels is None and not list(here.glob(pattern)):
        python = folder / "bin" / "python"
        runner.need([python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", here, ROOT], "building longshore")
    if not (found := list(here.glob(pattern))):
        raise StepError(f"{_shown(here)} has no wheel for Python {pair.python}: {pattern}")
    return found[0].resolve()


def test(pair: Pair, result: Result, folder: Path, workers: int, runner: Runner, say: Say) -> None:
    """Run the tests of a pair and fill in its row."""
    report = FOLDER / f"{pair.name}.xml"
    report.unlink(missing_ok=True)
    what = QUICK if result.selection == "quick" else ("tests",)
    parallel = ["-n", str(workers), "--dist", "worksteal"] if workers else []
    shown = 0

    def see(line: str) -> None:
        nonlocal shown
        percent = re.search(r"\[ *(\d+)%\]", line)
        if percent and int(percent[1]) >= shown + 10:
            shown = int(percent[1])
            say(f"{pair.name}: {shown} % of the tests")

    command = [folder / "bin" / "python", "-m", "pytest", "-q", "-m", "not slow", *parallel, f"--junitxml={report}"]
    runner.run([*command, *what], see)
    if not report.exists():
        raise StepError(f"pytest wrote no report; see {_shown(runner.log)}")
    count(ElementTree.parse(report), result)


def count(report: ElementTree.ElementTree, result: Result) -> None:
    """Add what a report of pytest says to a row."""
    for case in report.iter("testcase"):
        broken = case.find("failure") is not None or case.find("error") is not None
        skip = case.find("skipped")
        outcome = "failed" if broken else "skipped" if skip is not None else "passed"
        result.counts[outcome] = result.counts.get(outcome, 0) + 1
        if broken:
            result.failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif skip is not None:
            reason = skip.get("message", "")
            result.skipped[reason] = result.skipped.get(reason, 0) + 1


_VERSIONS = "import platform, torch; print('Python', platform.python_version() + ', torch', torch.__version__)"


def run_pair(pair: Pair, result: Result, options: argparse.Namespace, say: Say) -> None:
    """Make the environment of a pair, run its tests, and remove it."""
    program = interpreter(pair.python, [name for name in options.python if not _is_version(name)])
    if program is None:
        result.missing, result.problem = True, f"there is no python{pair.python} on the PATH"
        say(f"{pair.name}: NOT RUN: {result.problem}")
        return
    log, folder, begun = FOLDER / f"{pair.name}.log", FOLDER / pair.name, time.monotonic()
    log.unlink(missing_ok=True)
    runner = Runner(log)
    try:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
        install(pair, program, folder, options.wheels, runner, say)
        lines: list[str] = []
        runner.run([folder / "bin" / "python", "-W", "ignore", "-c", _VERSIONS], lines.append)
        result.found = lines[-1].strip() if lines else ""
        say(f"{pair.name}: runs the {result.selection} selection with {result.found}")
        test(pair, result, folder, options.workers, runner, say)
    except StepError as error:
        result.problem = str(error)
    finally:
        result.seconds = time.monotonic() - begun
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    say(f"{pair.name}: {result.problem or ', '.join(f'{n} {what}' for what, n in sorted(result.counts.items()))}")


# -- the table ------------------------------------------------------------------


def table(results: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of the table, as Markdown, and what failed and was skipped."""
    yield "| Python, torch | selection | passed | failed | skipped | minutes |"
    yield "|---|---|--:|--:|--:|--:|"
    for each in results:
        if each.problem:
            yield f"| {each.pair.python}, {each.pair.torch} | {each.selection} | not run: {each.problem} | | | |"
            continue
        counts = " | ".join(f"{each.counts.get(what, 0):,}" for what in ("passed", "failed", "skipped"))
        yield f"| {each.found or each.pair.name} | {each.selection} | {counts} | {each.seconds / 60:.1f} |"
    for each in results:
        for name in each.failed:
            yield f"FAILED on {each.pair.name}: {name}"


def skips(results: Sequence[Result]) -> Iterator[str]:
    """Yield why tests were skipped, with their number on each pair."""
    for each in results:
        for reason, number in sorted(each.skipped.items(), key=lambda item: -item[1]):
            yield f"{each.pair.name}: {number:5} skipped: {reason}"


# -- the command ----------------------------------------------------------------


def _is_version(name: str) -> bool:
    return re.fullmatch(r"\d+\.\d+", name) is not None


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.check_versions", description=__doc__.partition("\n\n")[2])
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="3.12",
        help="a version, or the path of an interpreter; may be repeated. With --torch: all pairs of both; without: the "
        "pairs of the matrix with it",
    )
    parser.add_argument("--torch", action="append", default=[], metavar="2.8", help="a version; may be repeated")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="the quick selection on all pairs")
    size.add_argument("--whole", action="store_true", help="the whole suite, but for slow tests, on all pairs")
    parser.add_argument("--keep", action="store_true", help="keep the environments, and complete those that were kept")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="wheels to test, instead of building them")
    parser.add_argument("--workers", type=int, default=3, metavar="N", help="pytest -n N; 0: one process (3)")
    return parser.parse_args(arguments)


def results_of(options: argparse.Namespace) -> list[Result]:
    """Return the rows to fill in, oldest first; the newest pair is one whose interpreter is here."""
    named = [name if _is_version(name) else version_of(name) for name in options.python]
    if None in named:
        raise StepError(f"--python {options.python[named.index(None)]} is no interpreter that runs here")
    pairs = pairs_of([name for name in named if name is not None], options.torch)
    if not pairs:
        raise StepError("the matrix has no such pair; name both a --python and a --torch")
    programs = [name for name in options.python if not _is_version(name)]
    here = [pair for pair in pairs if interpreter(pair.python, programs) is not None]
    ends = {here[0], here[-1]} if here else set()
    whole = set(pairs) if options.whole else set() if options.quick else ends
    return [Result(pair, "whole" if pair in whole else "quick") for pair in pairs]


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 0 if all that could be run passed, 130 after Ctrl-C."""
    begun = time.monotonic()

    def say(line: str) -> None:
        print(f"versions: [{time.monotonic() - begun:5.0f} s] {line}", flush=True)

    options = _options(arguments)
    former = signal.signal(signal.SIGTERM, _as_ctrl_c)
    results: list[Result] = []
    try:
        rows = results_of(options)
        FOLDER.mkdir(parents=True, exist_ok=True)
        for row in rows:
            run_pair(row.pair, row, options, say)
            results.append(row)
    except StepError as error:
        say(f"FAILED: {error}")
        return 2
    except KeyboardInterrupt:
        say("interrupted; what was run until then:")
        return 130
    finally:
        signal.signal(signal.SIGTERM, former)
        shutil.rmtree(FOLDER / f"wheels-{os.getpid()}", ignore_errors=True)
        for line in (*skips(results), "", *table(results)) if results else ():
            print(line, flush=True)
    return 0 if all(row.good for row in results) and not all(row.missing for row in results) else 1


def _as_ctrl_c(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

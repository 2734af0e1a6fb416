"""Run every mutant: ``python -m mutants [words of a name]``, with ``tests`` on the path (``make test-mutants``).

Each mutant is made in a copy of the tree, whose tests run on the copied package. Before that, what mutants name runs on
an unchanged copy: it has to pass there, and says how long a mutant may take.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from mutants import MUTANTS, ROOT, Mutant

AT_ONCE = 2
PASSED, FAILED = 0, 1
"""Exit codes of pytest; others (nothing collected, a usage error) say nothing about a mutant."""
COPIED = ("src", "tests", "examples", "pyproject.toml", "README.md", "docs")
LONGEST_UNCHANGED_S = 600.0

FROM_THE_COPY = """\
# The editable install finds the package before PYTHONPATH does.
import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
"""


class Outcome(NamedTuple):
    """How tests ended: pytest's exit code, None where they took too long; and the first that failed."""

    code: int | None
    seconds: float
    first: str


@contextmanager
def copied_tree():
    """A folder with the package, as it is and importable by itself, and its tests."""
    import longshore.kernels._native as native

    assert native.__file__ is not None
    with tempfile.TemporaryDirectory(prefix="longshore-mutant-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, tree / name)
        shutil.copy(native.__file__, tree / "src/longshore/kernels")
        (tree / "src/sitecustomize.py").write_text(FROM_THE_COPY)
        yield tree


def environment_of(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree / "src")}


def imported_from(tree: Path) -> Path:
    command = [sys.executable, "-c", "import longshore.host as host; print(host.__file__)"]
    done = subprocess.run(command, cwd=tree, env=environment_of(tree), capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def run_tests(tree: Path, tests: Sequence[str], limit_s: float) -> Outcome:
    """The tests, in the tree, until the first one fails."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "--tb=no",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    began = time.monotonic()
    # A session of its own: what hangs is ended together with the ranks that it started.
    with (tree / "output").open("w+") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=environment_of(tree), stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        lines = output.read().splitlines()
    first = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), "")
    return Outcome(code, time.monotonic() - began, first)


def run_unchanged(tests: Sequence[str]) -> Outcome:
    with copied_tree() as tree:
        found = imported_from(tree)
        if tree.resolve() not in found.resolve().parents:
            raise SystemExit(f"the tests of a copy have to import its package, but longshore came from {found}")
        outcome = run_tests(tree, tests, LONGEST_UNCHANGED_S)
    if outcome.code != PASSED:
        raise SystemExit(f"{' '.join(tests)} has to pass before anything is changed: {outcome.first or outcome.code}")
    return outcome


def run_mutant(mutant: Mutant, unchanged_s: float) -> Outcome:
    with copied_tree() as tree:
        file = tree / "src/longshore" / mutant.file
        file.write_text(mutant.applied_to(file.read_text()))
        return run_tests(tree, mutant.tests, 30.0 + 3.0 * unchanged_s)


def main(words: Sequence[str]) -> int:
    mutants = [mutant for mutant in MUTANTS if all(word in f"{mutant.file} {mutant.name}" for word in words)]
    for mutant in mutants:
        mutant.applied_to((ROOT / "src/longshore" / mutant.file).read_text())
    with ThreadPoolExecutor(AT_ONCE) as pool:
        selections = sorted({mutant.tests for mutant in mutants})
        unchanged = dict(zip(selections, pool.map(run_unchanged, selections), strict=True))
        print(f"{len(selections)} selections of tests pass on the unchanged tree", flush=True)
        survived, unclear = [], []
        outcomes = pool.map(lambda mutant: run_mutant(mutant, unchanged[mutant.tests].seconds), mutants)
        for mutant, outcome in zip(mutants, outcomes, strict=True):
            if outcome.code is None:
                said = "caught, hangs"
            elif outcome.code == FAILED:
                said = "caught"
            elif outcome.code == PASSED:
                said = "SURVIVED"
                survived.append(mutant)
            else:
                said = f"pytest ended with {outcome.code}"
                unclear.append(mutant)
            print(f"{said}: {mutant.file}: {mutant.name} ({outcome.seconds:.0f} s) {outcome.first[:160]}", flush=True)
    print(f"{len(mutants)} mutants: {len(mutants) - len(survived) - len(unclear)} caught, {len(survived)} survived")
    return 1 if survived or unclear or not mutants else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

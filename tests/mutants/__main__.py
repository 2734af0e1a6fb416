"""Run mutants: ``python -m mutants [words of a name]``, with ``tests`` on the path (``make test-mutants``).

Each mutant is made in a copy of the tree, whose tests run on the copied package. Tests that are slow do not count, and
those on the simulated device have to be in ``make test``. What a mutant names runs on an unchanged copy first: it has
to pass there, and its time limits the mutant's.

With ``--minutes 4 --seed TEXT`` (``make test-mutants-sample``) mutants are started until the time has passed, in an
order that depends on the text: in CI, on the commit's hash.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from mutants import MUTANTS, ROOT, Mutant
from mutants.mutant import what_does_not_apply

AT_ONCE = 2
PASSED, FAILED = 0, 1
"""Exit codes of pytest; others (nothing collected, a usage error) say nothing about a mutant."""
_CRASHES = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)
"""On the simulated device a stray access is a segmentation fault."""
_CAUGHT = {FAILED: "caught", None: "caught, hangs", **dict.fromkeys(_CRASHES, "caught, crashes")}
_ENDS = {**_CAUGHT, PASSED: "SURVIVED"}
ANYWHERE, ON_DEVICE = "not slow", "(simulated or gpu) and not medium and not slow"
COPIED = ("src", "tests", "examples", "pyproject.toml", "constraints.txt", "README.md", "docs")
LONGEST_UNCHANGED_S = 600.0
_COMPILED = shutil.ignore_patterns("__pycache__")

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
                # Compiled tests would know the path of the original.
                shutil.copytree(ROOT / name, tree / name, ignore=_COMPILED if name != "src" else None)
            else:
                shutil.copy(ROOT / name, tree / name)
        shutil.copy(native.__file__, tree / "src/longshore/kernels")
        (tree / "src/sitecustomize.py").write_text(FROM_THE_COPY)
        if (ROOT / "build/simulated_device").exists():
            (tree / "build").mkdir()
            (tree / "build/simulated_device").symlink_to(ROOT / "build/simulated_device")
        yield tree


def environment_of(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree / "src")}


def imported_from(tree: Path) -> Path:
    command = [sys.executable, "-c", "import longshore.tiles as host; print(host.__file__)"]
    done = subprocess.run(command, cwd=tree, env=environment_of(tree), capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def run_tests(tree: Path, tests: Sequence[str], on_device: bool, limit_s: float) -> Outcome:
    """The tests, in the tree, until the first one fails."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "--tb=no",
        "-m",
        ON_DEVICE if on_device else ANYWHERE,
        "-p",
        "no:cacheprovider",
        *(["--simulated-device"] if on_device else []),
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


def run_unchanged(tests: Sequence[str], on_device: bool) -> Outcome:
    with copied_tree() as tree:
        found = imported_from(tree)
        if tree.resolve() not in found.resolve().parents:
            raise SystemExit(f"the tests of a copy have to import its package, but longshore came from {found}")
        outcome = run_tests(tree, tests, on_device, LONGEST_UNCHANGED_S)
    if outcome.code != PASSED:
        raise SystemExit(f"{' '.join(tests)} has to pass before anything is changed: {outcome.first or outcome.code}")
    return outcome


def run_mutant(mutant: Mutant, unchanged_s: float) -> Outcome:
    with copied_tree() as tree:
        file = tree / "src/longshore" / mutant.file
        file.write_text(mutant.applied_to(file.read_text()))
        return run_tests(tree, mutant.tests, mutant.on_device, 30.0 + 3.0 * unchanged_s)


class Player:
    """Plays mutants at once until a time; each selection of tests runs once on an unchanged copy."""

    def __init__(self, minutes: float) -> None:
        self._deadline = time.monotonic() + 60.0 * minutes
        self._unchanged: dict[tuple[tuple[str, ...], bool], Future[Outcome]] = {}
        self._lock = threading.Lock()

    def play(self, mutant: Mutant) -> Outcome | None:
        """How the mutant's tests end; None: it is too late to begin."""
        if time.monotonic() > self._deadline:
            return None
        with self._lock:
            selection = mutant.tests, mutant.on_device
            mine = selection not in self._unchanged
            unchanged = self._unchanged.setdefault(selection, Future())
        if mine:
            try:
                unchanged.set_result(run_unchanged(*selection))
            except BaseException as error:
                unchanged.set_exception(error)
        return run_mutant(mutant, unchanged.result().seconds)


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mutants")
    parser.add_argument("words", nargs="*", help="that a mutant's file and name have in them")
    parser.add_argument("--minutes", type=float, default=math.inf, help="until then mutants are started")
    parser.add_argument("--seed", help="any text: says in which order they are")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    arguments = arguments_of(words)
    mutants = [mutant for mutant in MUTANTS if all(word in f"{mutant.file} {mutant.name}" for word in arguments.words)]
    if stale := what_does_not_apply(mutants):
        raise SystemExit("\n".join(stale))
    if arguments.seed is not None:
        random.Random(arguments.seed).shuffle(mutants)
    player, said = Player(arguments.minutes), Counter[str]()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for mutant, outcome in zip(mutants, pool.map(player.play, mutants), strict=True):
            if outcome is None:
                continue
            end = _ENDS.get(outcome.code, f"pytest ended with {outcome.code}")
            said[end] += 1
            print(f"{end}: {mutant.file}: {mutant.name} ({outcome.seconds:.0f} s) {outcome.first[:160]}", flush=True)
    played, caught = said.total(), sum(said[end] for end in {*_CAUGHT.values()})
    print(f"{len(mutants)} mutants: {played} played, {caught} caught, {said[_ENDS[PASSED]]} survived")
    return 0 if 0 < played == caught else 1


if __name__ == "__main__":
    sys.exit(main())

"""Runs one part in a fresh process: ``python -m benchmarks.child MODULE SETTINGS_JSON RESULTS_PATH``.

A process of its own has no memory, threads or imports of another part's; and
it may be another interpreter, where that is the one that has DeepSpeed.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent


class PartFailed(Exception):
    """A part did not come to its end; the message is the end of what it printed."""


def measure_in_child(module: str, settings: Mapping[str, Any], threads: int, python: str = sys.executable) -> Any:
    """The results of ``benchmarks.<module>.measure(settings)``, run by ``python`` with ``threads`` OpenMP threads.

    Raises:
        PartFailed: it raised, or the interpreter lacks a package.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        # For both OpenMP runtimes of the process: torch's own, and the one of extensions.
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(
            [python, "-m", "benchmarks.child", module, json.dumps(settings), str(path)],
            cwd=_ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        if done.returncode != 0:
            raise PartFailed(f"{module} failed with status {done.returncode}; its message is above")
        return json.loads(path.read_text())


class Progress:
    """Lines about what is going on, on standard error: rewritten on a terminal, every 10 s elsewhere."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._live = sys.stderr.isatty()
        self._last = 0.0

    def __call__(self, text: str) -> None:
        line = f"{self._prefix}: {text}"
        if self._live:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._last > 10:
            self._last = time.monotonic()
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def main(module: str, settings: str, path: str) -> None:
    part = importlib.import_module(f"benchmarks.{module}")
    progress = Progress(part.PART)
    results = part.measure(json.loads(settings), progress)
    progress.end()
    Path(path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])

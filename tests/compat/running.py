"""Scripts as ``longshore run-deepspeed`` runs them, inside a process that has torch already."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

from ranks import forking_context

SCRIPTS = Path(__file__).parent / "scripts"
_TIMEOUT_S = 60


def run_here(script: str, *arguments: str) -> int:
    """The exit code; the process is as it was afterwards, but for what was imported."""
    from longshore.cli import main
    from longshore.compat.finder import stand_aside

    before = sys.argv, list(sys.path), dict(os.environ), sys.modules["__main__"]
    try:
        return main(["run-deepspeed", str(SCRIPTS / script), *arguments])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        stand_aside()
        sys.argv, sys.path[:], environ, sys.modules["__main__"] = before
        os.environ.clear()
        os.environ.update(environ)
        sys.modules.pop("toy", None)


def run_or_raise(function: Any, *arguments: str) -> None:
    """``function``: the name of a script, or a function of :mod:`direct`."""
    if callable(function):
        function(*arguments)
    else:
        assert run_here(function, *arguments) == 0, f"{function} failed; see its standard error"


def _in_child(words: Path, function: Any, arguments: tuple[str, ...]) -> None:
    os.dup2(os.open(words, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    import warnings

    import torch

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    try:
        run_or_raise(function, *arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def alone(folder: Path, function: Any, *arguments: str) -> None:
    """In a process of its own, which may open a process group."""
    words = folder / "standard_error"
    child = forking_context().Process(target=_in_child, args=(words, function, arguments))
    child.start()
    child.join(_TIMEOUT_S)
    if child.is_alive():
        child.kill()
    assert child.exitcode == 0, words.read_text()

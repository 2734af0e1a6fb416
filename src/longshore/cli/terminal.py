"""Output for users: lines on the terminal, progress, and errors as one line on stderr with an exit code.

Printing also works where standard output is a full disk, or a pipe whose reader has gone.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, NamedTuple

from rich.console import Console

USAGE = 2
"""The exit code of a command that was refused before it did anything."""
_RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
GRACE_S = 5.0
"""Seconds in which the first rank of a machine can print the error that ended all of its ranks."""


class CommandError(Exception):
    """One line for the user, with the finding and the remedy, and the exit code."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class SettingsError(CommandError, ValueError):
    """Settings that are refused before training starts."""

    def __init__(self, message: str) -> None:
        super().__init__(message, USAGE)


class SharedError(CommandError):
    """An error that ends all ranks alike. One of them prints it."""


class StopNow(BaseException):
    """Raised by the second signal, wherever the program is, so that a file that is half written is removed.

    Like KeyboardInterrupt it is not an Exception, so that no handler treats it as a failure to recover from.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code


class LaunchedRank(NamedTuple):
    """One of the processes of a run; ``speaks``: whether it prints for all ranks of its machine."""

    rank: int
    world_size: int
    speaks: bool


ALONE = LaunchedRank(0, 1, True)


def launched_rank() -> LaunchedRank:
    """Return this process's rank, from the launcher's variables.

    Variables that are wrong are ignored here. Joining the ranks reports them.
    """
    if not any(name in os.environ for name in _RANK_NAMES):
        return ALONE
    from longshore.seam import detect  # only now, since it imports torch

    try:
        launch = detect(os.environ)
    except ValueError:
        return ALONE
    return LaunchedRank(launch.rank, launch.world_size, launch.local_rank == 0)


def os_reason(error: OSError) -> str:
    """Return the system's message for ``error``, without Python's ``[Errno 28]`` and without the path."""
    if error.errno == errno.ENOSPC:
        return "the disk is full"
    return error.strerror or os.strerror(error.errno or 0)


def one_line(error: BaseException) -> str:
    """Return the first line of a library's message, which may be a page long."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(":. ") if lines else type(error).__name__


def import_extra(module: str) -> Any:
    """Import a module of ``longshore[train]``, without its warnings.

    Raises:
        CommandError: it cannot be imported.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise CommandError(f"{name} cannot be imported ({one_line(error)}): pip install 'longshore[train]'") from error


class SafeOutput:
    """A text stream over ``sys.stdout`` that discards text that cannot be written, so that training continues."""

    def __init__(self) -> None:
        self._stream: IO[str] | None = sys.stdout

    def write(self, text: str) -> int:
        self._attempt("write", text)
        return len(text)

    def flush(self) -> None:
        self._attempt("flush")

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _attempt(self, method: str, *arguments: str) -> None:
        if self._stream is None:
            return
        try:
            getattr(self._stream, method)(*arguments)
        except OSError as error:
            silence_stdout()
            self._stream = None
            if not isinstance(error, BrokenPipeError):
                warn(f"cannot write to standard output: {os_reason(error)}; going on without it")


def make_console(quiet: bool = False) -> Console:
    """Return a console: plain text and 100 columns unless stdout is a terminal. ``quiet``: it prints nothing."""
    output: Any = SafeOutput()
    return Console(
        file=output, width=None if output.isatty() else 100, highlight=False, soft_wrap=not output.isatty(), quiet=quiet
    )


def print_lines(lines: Iterable[str]) -> None:
    """Print lines as they are: without markup, and never wrapped by us."""
    console = make_console()
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Callable[[int, str], None]]:
    """Show a progress bar of ``total`` steps, on a terminal only; yield a function of the steps done and a text."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.fields[state]}"), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, state="")
        yield lambda done, state: bar.update(task, completed=done, state=state)


def silence_stdout() -> None:
    """Redirect standard output to the null device, since Python flushes it at exit and would report the error again."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def warn(message: str) -> None:
    """Print one line on stderr."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"longshore: {message}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print each ``UserWarning`` of a block as one line on stderr, at the end of the block."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        finally:
            for each in caught:
                warn(str(each.message))


def quantity(count: float) -> str:
    """Return 1234567 as '1.23 M'."""
    for unit in ("", " k", " M"):
        if abs(count) < 999.5:  # a count that rounds to 1000 is 1 of the next unit
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} G"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

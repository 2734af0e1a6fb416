"""Printing, also where standard output is a full disk or a pipe whose reader has gone."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from typing import IO, Any

from rich.console import Console

from longshore.cli.failure import os_reason


class SafeOutput:
    """A text stream over ``sys.stdout`` that discards what cannot be written, so that training continues."""

    def __init__(self) -> None:
        self._stream: IO[str] | None = sys.stdout

    def write(self, text: str) -> int:
        if self._stream is not None:
            try:
                self._stream.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            try:
                self._stream.flush()
            except OSError as error:
                self._give_up(error)

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self, error: OSError) -> None:
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


class Display:
    """A context that shows a progress bar of ``total`` steps, on a terminal only, and lines above it."""

    def __init__(self, console: Console, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = console
        state = TextColumn("{task.fields[state]}")
        columns = BarColumn(bar_width=24), MofNCompleteColumn(), state, TimeRemainingColumn()
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=total, state="")

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, completed: int, state: str) -> None:
        self._bar.update(self._task, completed=completed, state=state)

    def line(self, text: str) -> None:
        self._console.print(text, markup=False)


def silence_stdout() -> None:
    """Redirect standard output to nowhere, since Python flushes it at exit and would report the error again."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def warn(message: str) -> None:
    """Print one line on stderr."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"longshore: {message}", file=sys.stderr, flush=True)


def quantity(count: float) -> str:
    """Return 1234567 as '1.23 M'."""
    for unit in ("", " k", " M"):
        if abs(count) < 999.5:  # what rounds to 1000 is 1 of the next unit
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} G"


@contextlib.contextmanager
def told_warnings() -> Iterator[None]:
    """Print each ``UserWarning`` of a block as one line on stderr, at its end."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        finally:
            for each in told:
                warn(str(each.message))


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

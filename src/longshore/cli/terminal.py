"""Standard output that may be a terminal, a file, a full disk or a pipe whose reader has gone."""

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
    """A text stream over ``sys.stdout`` that goes quiet when nobody reads it: a training run goes on without."""

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
    """Plain text and 100 columns unless standard output is a terminal. ``quiet`` prints nothing."""
    output: Any = SafeOutput()
    return Console(
        file=output, width=None if output.isatty() else 100, highlight=False, soft_wrap=not output.isatty(), quiet=quiet
    )


def silence_stdout() -> None:
    """Python writes once more when it ends, and would complain; this lets that succeed."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def warn(message: str) -> None:
    """One line on stderr."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"longshore: {message}", file=sys.stderr, flush=True)


def quantity(count: float) -> str:
    """1234567 as '1.23 M'."""
    for unit in ("", " k", " M"):
        if abs(count) < 999.5:  # what rounds to 1000 is 1 of the next unit
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} G"


@contextlib.contextmanager
def told_warnings() -> Iterator[None]:
    """Each as one line on stderr, at the end."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        finally:
            for each in told:
                warn(str(each.message))


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

"""What the command line says when it cannot go on: one line on stderr and an exit code."""

from __future__ import annotations

import errno
import os

USAGE = 2  # the exit code for what was refused before anything was done


class CommandError(Exception):
    """One line for the user, saying what was found and what to do, and the exit code to end with."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class SettingsError(CommandError, ValueError):
    """Settings that are refused before training starts."""

    def __init__(self, message: str) -> None:
        super().__init__(message, USAGE)


class SharedError(CommandError):
    """What ends all ranks alike. One of them says it."""


def os_reason(error: OSError) -> str:
    """The system's words for ``error`` without Python's ``[Errno 28]`` and without the path."""
    if error.errno == errno.ENOSPC:
        return "the disk is full"
    return error.strerror or os.strerror(error.errno or 0)


def one_line(error: BaseException) -> str:
    """The first line of a library's message, which may go on for a page."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(":. ") if lines else type(error).__name__

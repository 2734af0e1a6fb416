"""Errors of the command line, each one line on stderr and an exit code, and which rank of a run prints them."""

from __future__ import annotations

import errno
import os
import time
from typing import NamedTuple

USAGE = 2  # the exit code of what was refused before anything was done
_RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_GRACE_S = 5.0


class CommandError(Exception):
    """One line for the user, which says what was found and what to do, and the exit code."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class SettingsError(CommandError, ValueError):
    """Settings that are refused before training starts."""

    def __init__(self, message: str) -> None:
        super().__init__(message, USAGE)


class SharedError(CommandError):
    """An error that ends all ranks alike. One of them prints it."""


class LaunchedRank(NamedTuple):
    """One of the processes of a run; ``speaks``: it prints what all ranks of its machine would print."""

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
    # After the test, since it imports torch.
    from longshore.engine.launch import detect

    try:
        launch = detect(os.environ)
    except ValueError:
        return ALONE
    return LaunchedRank(launch.rank, launch.world_size, launch.local_rank == 0)


def leave_it_to_the_first() -> None:
    """Wait while the first rank of this machine prints what ended all of them.

    A launcher ends all ranks as soon as one has ended, and the line would be lost if that was this one.
    """
    time.sleep(_GRACE_S)


def os_reason(error: OSError) -> str:
    """Return the system's words for ``error``, without Python's ``[Errno 28]`` and without the path."""
    if error.errno == errno.ENOSPC:
        return "the disk is full"
    return error.strerror or os.strerror(error.errno or 0)


def one_line(error: BaseException) -> str:
    """Return the first line of a library's message, which may be a page long."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(":. ") if lines else type(error).__name__

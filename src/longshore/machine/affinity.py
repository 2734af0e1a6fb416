"""Binding this process to CPUs while it runs, and finding those that other ranks were bound to."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection
from pathlib import Path

from longshore.machine.limits import text_of
from longshore.machine.topology import cpu_list

_RANK_VARIABLES = (b"LOCAL_RANK=", b"SLURM_LOCALID=", b"OMPI_COMM_WORLD_LOCAL_RANK=", b"MPI_LOCALRANKID=")


class BoundThreads:
    """The threads of this process, on some CPUs until they are released; threads that they start follow.

    Threads that were on other CPUs than the caller's are left there: someone put them there.

    Args:
        cpus: logical CPUs, some of those that the caller may use.

    Raises:
        OSError: a CPU that is not to be had; nothing was bound.
    """

    def __init__(self, cpus: Collection[int]) -> None:
        self.cpus = frozenset(cpus)
        self._former = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cpus)
        if os.sched_getaffinity(0) != self.cpus:  # Linux leaves out what is not there, as long as some are
            os.sched_setaffinity(0, self._former)
            raise OSError(errno.EINVAL, f"not all of CPU {cpu_list(self.cpus)} are to be had")
        _move_threads(self._former, self.cpus)

    def release(self) -> None:
        """Back to where they were, but for those that were put elsewhere since."""
        _move_threads(self.cpus, self._former)


def _move_threads(source: Collection[int], target: Collection[int]) -> None:
    moved = True
    while moved:  # a thread that is not moved yet may start another
        moved = False
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it has ended
                if os.sched_getaffinity(int(thread)) == source != target:
                    os.sched_setaffinity(int(thread), target)
                    moved = moved or os.sched_getaffinity(int(thread)) != source


def cpus_of_other_ranks(usable: Collection[int], root: Path = Path("/")) -> dict[int, frozenset[int]]:
    """CPUs that processes with a launcher's variables were bound to, by process: ranks of other runs.

    Args:
        usable: the CPUs of this process; whoever may use all of them is not bound.
        root: where ``proc`` is.
    """
    found = {}
    for folder in root.glob("proc/[0-9]*"):
        number = int(folder.name)
        if number == os.getpid():
            continue
        with contextlib.suppress(OSError):  # ended, or another user's
            cpus = frozenset(os.sched_getaffinity(number)) & frozenset(usable)
            if cpus and len(cpus) < len(usable) and _is_rank((folder / "environ").read_bytes()):
                found[number] = cpus
    return found


def _is_rank(environ: bytes) -> bool:
    return any(entry.startswith(_RANK_VARIABLES) for entry in environ.split(b"\0"))


def machine_identity(root: Path = Path("/")) -> str:
    """The same for all processes of one running system, in whichever container they are."""
    return text_of(root / "proc/sys/kernel/random/boot_id").strip() or os.uname().nodename

"""Bind this process to CPUs while it runs, and find the CPUs that ranks of other runs were bound to."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection
from pathlib import Path

from longshore.machine.hardware import cpu_list, text_of

_RANK_VARIABLES = (b"LOCAL_RANK=", b"SLURM_LOCALID=", b"OMPI_COMM_WORLD_LOCAL_RANK=", b"MPI_LOCALRANKID=")


class BoundThreads:
    """Binds the threads of this process to CPUs until :meth:`release`; threads that they start are bound too.

    Threads whose affinity differs from the caller's keep it, since it was chosen for them.

    Args:
        cpus: numbers of logical CPUs that the caller may use.

    Raises:
        OSError: a CPU is not available; nothing was bound.
    """

    def __init__(self, cpus: Collection[int]) -> None:
        self.cpus = frozenset(cpus)
        self._former = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cpus)
        if os.sched_getaffinity(0) != self.cpus:  # Linux ignores missing CPUs, as long as one exists
            os.sched_setaffinity(0, self._former)
            raise OSError(errno.EINVAL, f"not all of CPU {cpu_list(self.cpus)} are available")
        _move_threads(self._former, self.cpus)

    def release(self) -> None:
        """Restore the former affinity of all threads whose affinity was not changed since."""
        _move_threads(self.cpus, self._former)


def _move_threads(source: Collection[int], target: Collection[int]) -> None:
    moved = True
    while moved:  # a thread that has not been moved yet may start another one
        moved = False
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # the thread has ended
                if os.sched_getaffinity(int(thread)) == source != target:
                    os.sched_setaffinity(int(thread), target)
                    moved = moved or os.sched_getaffinity(int(thread)) != source


def cpus_of_other_ranks(usable: Collection[int], root: Path = Path("/")) -> dict[int, frozenset[int]]:
    """CPUs that ranks of other runs were bound to, by process number.

    A rank is a process with a launcher's environment variables.

    Args:
        usable: the CPUs of this process; a process that may use all of them is not bound.
        root: the folder with ``proc``.
    """
    found = {}
    for folder in root.glob("proc/[0-9]*"):
        number = int(folder.name)
        if number == os.getpid():
            continue
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            cpus = frozenset(os.sched_getaffinity(number)) & frozenset(usable)
            if cpus and len(cpus) < len(usable) and _is_rank((folder / "environ").read_bytes()):
                found[number] = cpus
    return found


def _is_rank(environ: bytes) -> bool:
    return any(entry.startswith(_RANK_VARIABLES) for entry in environ.split(b"\0"))


def machine_identity(root: Path = Path("/")) -> str:
    """A text that is the same for all processes of one running system, in any container."""
    return text_of(root / "proc/sys/kernel/random/boot_id").strip() or os.uname().nodename

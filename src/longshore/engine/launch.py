"""Rank, world size and meeting point of this process, read from the environment for :mod:`longshore.engine.ranks`.

Processes inherit the variables of every launcher above them, so several families may be set at once. The innermost
launcher counts, in this order: RANK and related variables (torchrun, or set by hand), Open MPI, PMI (MPICH, Intel MPI),
Slurm. A shell inside a Slurm allocation, which has ``SLURM_NTASKS`` but no ``SLURM_PROCID``, is a single rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

DEFAULT_PORT = 29500
_SLURM_PORTS = (20000, 12000)
"""The first port and the number of ports for jobs; they are below those for outgoing connections."""


@dataclass(frozen=True)
class Launch:
    """One process of a run.

    Attributes:
        launcher: the family of variables that was read, for error messages.
        master_addr: host of rank 0; ``None`` if it is neither set nor needed.
        master_port: port of rank 0 on ``master_addr``.
    """

    rank: int
    world_size: int
    local_rank: int
    launcher: str
    master_addr: str | None = None
    master_port: int = DEFAULT_PORT

    @property
    def needs_group(self) -> bool:
        """Whether there are several ranks, or one with a launcher's meeting point, on which scripts may rely."""
        return self.world_size > 1 or (self.launcher == "RANK" and self.master_addr is not None)


ALONE = Launch(rank=0, world_size=1, local_rank=0, launcher="none")


class _Family(NamedTuple):
    """Names of one launcher's variables. If there are several names, the first that is set counts."""

    launcher: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    claims: tuple[str, ...]
    """Variables of which any one shows that this launcher started the process."""


_RANK = _Family("RANK", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
_OPEN_MPI = _Family(
    "Open MPI",
    ("OMPI_COMM_WORLD_RANK",),
    ("OMPI_COMM_WORLD_SIZE",),
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)
_PMI = _Family(
    "PMI",
    ("PMI_RANK",),
    ("PMI_SIZE",),
    ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"),
    ("PMI_RANK", "PMI_SIZE"),
)
_SLURM = _Family(
    "Slurm", ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",), ("SLURM_PROCID",)
)
_FAMILIES = (_RANK, _OPEN_MPI, _PMI, _SLURM)
LOCAL_RANK_NAMES = tuple(name for family in _FAMILIES for name in family.local_rank)


def detect(environ: Mapping[str, str]) -> Launch:
    """Read rank, world size, local rank and meeting point from a process's environment.

    Returns:
        :data:`ALONE` if no launcher's variables are set.

    Raises:
        ValueError: variables are only partly set, are not numbers, or contradict each other; the message names them.
    """
    claimed = [family for family in _FAMILIES if any(name in environ for name in family.claims)]
    if not claimed:
        return ALONE
    family = claimed[0]
    problems: list[str] = []
    rank, world_size, local_rank = _numbers(family, environ, problems)
    if not problems and family is _RANK:
        problems += _contradictions(rank, world_size, claimed[1:], environ)
    addr, port = _meeting_point(family, world_size, environ, problems)
    if problems:
        raise ValueError(
            f"the environment does not say who this rank is ({family.launcher} variables): " + "; ".join(problems)
        )
    return Launch(rank, world_size, local_rank, family.launcher, addr, port)


def _integer(
    name: str | None, environ: Mapping[str, str], problems: list[str], least: int, most: int | None = None
) -> int:
    """Read a variable. Return ``least`` if ``name`` is None, or if the value is wrong; ``problems`` then says so."""
    if name is None:
        return least
    text = environ[name].strip()
    if text.isascii() and text.isdigit() and int(text) >= least and (most is None or int(text) <= most):
        return int(text)
    upper = "" if most is None else f" and at most {most}"
    problems.append(f"{name} must be an integer of at least {least}{upper}, and is {environ[name]!r}")
    return least


def _numbers(family: _Family, environ: Mapping[str, str], problems: list[str]) -> tuple[int, int, int]:
    """Read rank, world size and local rank; a wrong one is 0, 1 or 0, and is added to ``problems``."""
    if family is _PMI and environ.get("SLURM_PROCID") != environ.get("PMI_RANK"):
        # SLURM_LOCALID is inherited from the job, and is the same for all ranks.
        environ = {name: value for name, value in environ.items() if name != "SLURM_LOCALID"}
    wanted = (family.rank, family.world_size, family.local_rank)
    names = [next((name for name in each if name in environ), None) for each in wanted]
    rank_name, size_name, local_name = names
    world_size = _integer(size_name, environ, problems, least=1)
    missing = [each[0] for each, name in zip(wanted, names, strict=True) if name is None]
    if world_size == 1 and size_name is not None and local_name is None:
        missing.pop()  # a single rank needs no local rank
    if missing:
        present = [name for name in names if name is not None]
        problems.append(f"{_are(present)} set, and {_are(missing)} not: set all of them, or none to run as one rank")
    rank = _integer(rank_name, environ, problems, least=0)
    local_rank = _integer(local_name, environ, problems, least=0)
    if rank_name is not None and size_name is not None:
        if rank >= world_size:
            problems.append(f"{rank_name}={rank} must be below {size_name}={world_size}")
        elif local_rank > rank:
            # Ranks of one machine are numbered in the order of the run's ranks.
            problems.append(f"{local_name}={local_rank} must not be above {rank_name}={rank}")
    return rank, world_size, local_rank


def _contradictions(rank: int, world_size: int, others: Sequence[_Family], environ: Mapping[str, str]) -> list[str]:
    """Compare RANK and WORLD_SIZE, if set by hand, with those of the launcher that started this process.

    torchrun numbers its ranks itself, and sets a variable to show it. Variables that a launcher inside a Slurm job
    inherits from the job may differ; inside one ``srun`` step of the same size they may not.
    """
    found: list[str] = []
    same_step = "SLURM_STEP_ID" in environ and environ.get("SLURM_STEP_NUM_TASKS") == str(world_size)
    for other in others if "TORCHELASTIC_RUN_ID" not in environ else ():
        if other is _SLURM and not same_step:
            continue
        ignored: list[str] = []
        theirs = _numbers(other, environ, ignored)
        if not ignored and theirs[:2] != (rank, world_size):
            says = ", ".join(f"{name}={environ[name]}" for name in (*other.rank, *other.world_size) if name in environ)
            found.append(
                f"RANK={rank}, WORLD_SIZE={world_size} contradict {says} of {other.launcher}: unset RANK, WORLD_SIZE "
                f"and LOCAL_RANK to use {other.launcher}'s, or unset the others"
            )
    return found


def _meeting_point(
    family: _Family, world_size: int, environ: Mapping[str, str], problems: list[str]
) -> tuple[str | None, int]:
    """Return host and port of rank 0."""
    port = _integer("MASTER_PORT", environ, problems, 1, 65535) if "MASTER_PORT" in environ else DEFAULT_PORT
    addr = environ.get("MASTER_ADDR", "").strip()
    if family is _RANK:
        if addr and "MASTER_PORT" in environ:
            return addr, port
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name, "").strip()]
        if world_size > 1:
            problems.append(f"{_are(missing)} not set: where rank 0 listens for the other {world_size - 1}")
        return None, port
    if world_size == 1:
        return None, port
    if not addr and "SLURM_JOB_NODELIST" in environ:
        try:
            addr = first_host(environ["SLURM_JOB_NODELIST"])
        except ValueError as error:
            problems.append(f"SLURM_JOB_NODELIST: {error}")
    elif not addr and family is _OPEN_MPI and environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(world_size):
        return "127.0.0.1", port
    elif not addr:
        names = "MASTER_ADDR or SLURM_JOB_NODELIST" if family is _SLURM else "MASTER_ADDR"
        problems.append(
            f"{names} is not set: set MASTER_ADDR to the host of rank 0, and MASTER_PORT to a free port there"
        )
    job, step = (environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    if "MASTER_PORT" not in environ and job.isdigit():
        # This port is the same on all ranks, and mostly differs between jobs or steps that share a host.
        first, count = _SLURM_PORTS
        port = first + (int(job) * 7 + (int(step) if step.isdigit() else 0)) % count
    return addr, port


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: ``"rack2n07"`` for ``"rack[2-3]n[07-09,12],login"``.

    Raises:
        ValueError: the list is empty, or a bracket is not closed.
    """
    first = re.fullmatch(r"((?:[^\[\],]|\[[^,\-\]][^\]]*\])+)(?:,.*)?", nodelist.strip())
    if first is None:
        raise ValueError(f"{nodelist!r} is no list of hosts such as 'node[01-04]'")
    return re.sub(r"\[([^,\-\]]+)[^\]]*\]", r"\1", first[1])


def _are(names: Sequence[str]) -> str:
    """Return ``"A is"`` or ``"A and B are"``."""
    return f"{names[0]} is" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} are"

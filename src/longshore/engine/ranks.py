"""The ranks of a run, joined by the launcher's variables or taken from an existing process group.

Processes inherit the variables of every launcher above them, so several families may be set at once. The innermost
launcher counts, in this order: RANK and related variables (torchrun, or set by hand), Open MPI, PMI (MPICH, Intel MPI),
Slurm. A shell inside a Slurm allocation, which has ``SLURM_NTASKS`` but no ``SLURM_PROCID``, is a single rank.

The ranks of one start find each other in the store that all of them reach.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from longshore.accelerator import accelerator_type, is_accelerator
from longshore.engine.wording import did_you_mean, is_number
from longshore.errors import LongshoreError
from longshore.ranks.presence import presence
from longshore.ranks.waiting import gather_from_all

_POLL_S, _MOST_POLL_S = 0.005, 0.1

_stores: dict[tuple[str, int, int], Store] = {}
"""For each address and rank the store. It stays until the process ends: rank 0 could not open its port again while
others still leave."""

DEFAULT_PORT = 29500
_SLURM_PORTS = (20000, 12000)
"""The first port and the number of ports for jobs; they are below those for outgoing connections."""

T = TypeVar("T")

DEFAULT_TIMEOUT = timedelta(minutes=30)


def store_at(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return the store that torchrun, or otherwise rank 0, has at this address."""
    key = f"{host}:{port}", rank, world_size
    if key not in _stores:
        # torchrun says so, as torch's own rendezvous reads it. Rank 0 need not wait: it finds out below who is missing.
        hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        _stores[key] = TCPStore(
            host, port, world_size, is_master=hosts, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
    _stores[key].set_timeout(timeout)
    return _stores[key]


def forget_stores() -> None:
    """Connect anew the next time."""
    _stores.clear()


class Start:
    """One start of all ranks, each with a name of its own that it draws.

    The store may have seen others: a process that joins again, or torchrun, which starts all ranks again in the store
    of those that failed (and counts its restarts differently on each host). So rank 0 says by which names it knows the
    ranks, and each confirms the names in which its own is: all of these belong to one start.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._until = time.monotonic() + timeout.total_seconds()
        self._own = secrets.token_hex(8)

    def meet(self) -> Store:
        """Wait for all ranks, and return a part of the store that only they use. Raises TimeoutError."""
        own = PrefixStore("longshore/start", self._store)
        own.set(f"name/{self._rank}", self._own)
        names = [""] * self._world_size

        def all_confirmed() -> bool:
            nonlocal names
            if self._rank == 0:
                now = [_read(own, f"name/{rank}") for rank in range(self._world_size)]
                if now != names:
                    own.set("names", json.dumps(now))
                names = now
            else:
                names = json.loads(_read(own, "names") or "[]") or names
            if names[self._rank] != self._own:
                return False
            own.set(f"{names[0]}/{self._rank}", self._own)
            if self._rank == 0 and not missing():
                own.set(f"{names[0]}/all", "")
            return own.check([f"{names[0]}/all"])

        def missing() -> list[int]:
            if names[self._rank] != self._own:
                return [0]
            return [rank for rank, name in enumerate(names) if not name or _read(own, f"{names[0]}/{rank}") != name]

        self._wait(all_confirmed, missing, "did not come")
        return PrefixStore(f"longshore/{names[0]}", self._store)

    def connect(self, store: Store, make: Callable[[], Any]) -> None:
        """Make the process group in the store that :meth:`meet` returned; raise the error of any rank.

        Some ranks may reach each other and others not, and gloo waits for each of them in turn. So this waits beside
        it, for the time that is left. Gloo connects its ranks when a group is made: one that is done first, and that
        ends with an error at once, would break the connection that another is still making.
        """
        failures: list[Exception] = []
        over = threading.Event()

        def run() -> None:
            try:
                make()
            except Exception as error:
                failures.append(error)
            over.set()

        threading.Thread(target=run, name="longshore-rendezvous", daemon=True).start()
        self._wait(over.is_set, lambda: self._without(store, "connected"), "could not be connected", store)
        if failures:
            store.set(f"failed/{self._rank}", str(failures[0]).splitlines()[0])
            store.set("failed", str(self._rank))
            raise failures[0]
        store.set(f"connected/{self._rank}", "")
        everyone = [f"connected/{rank}" for rank in range(self._world_size)]
        self._wait(
            lambda: store.check(everyone), lambda: self._without(store, "connected"), "could not be connected", store
        )

    def _without(self, store: Store, key: str) -> list[int]:
        others = (rank for rank in range(self._world_size) if rank != self._rank)
        return [rank for rank in others if not store.check([f"{key}/{rank}"])]

    def _wait(
        self, true: Callable[[], bool], missing: Callable[[], list[int]], what: str, store: Store | None = None
    ) -> None:
        pause_s = _POLL_S
        while not true():
            if store is not None and (failed := _read(store, "failed")):
                raise ConnectionError(f"rank {failed} could not connect ({_read(store, f'failed/{failed}')})")
            if time.monotonic() > self._until:
                raise TimeoutError(f"rank {', '.join(map(str, missing())) or 'that has a part'} {what}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_POLL_S)


def _read(store: Store, key: str) -> str:
    return bytes(store.get(key)).decode() if store.check([key]) else ""


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


class RendezvousError(LongshoreError):
    """The ranks did not meet in time: one did not start, died, or uses another address."""


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of its run.

    Attributes:
        rank, world_size: index and number of ranks in the run.
        local_rank: index on this machine.
        device: where this rank trains.
        group: the process group, or ``None`` for one rank that needs none.
        owns_group: whether :func:`join` made it, so that :meth:`close` destroys it.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    group: dist.ProcessGroup | None
    owns_group: bool

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, which must be picklable; all ranks have to call."""
        return [value] if self.world_size == 1 else gather_from_all("setting up an engine", value)

    def close(self) -> None:
        """Destroy the process group if :func:`join` made it and it still exists."""
        if self.owns_group and dist.is_initialized() and dist.group.WORLD is self.group:
            if (here := presence()) is not None:
                here.leave_group()
            dist.destroy_process_group()


def join(
    backend: str | None = None,
    device: str | torch.device | None = None,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
    environ: Mapping[str, str] | None = None,
) -> Ranks:
    """Join the other ranks, whichever launcher started this process.

    A process group that is already initialised is used, and is not destroyed here. Otherwise the variables of torchrun,
    Open MPI, PMI or Slurm identify this rank (:func:`detect`); without any, this is the only rank, and
    no process group is made.

    Args:
        backend: backend of torch.distributed; by default nccl for CUDA, gloo for the CPU.
        device: where this rank trains; by default the local rank's CUDA device if there is CUDA, else the CPU. It
            becomes the current device.
        timeout: for meeting the other ranks, and later for each collective; a timedelta, or seconds.
        environ: variables to read in place of the process's environment.

    Raises:
        ValueError: variables are only partly set or contradict each other; or the device or the backend does not exist,
            or they do not fit each other.
        TypeError: a device, a backend or a timeout has another type.
        RendezvousError: the other ranks did not join in time.
    """
    limit = _checked_timeout(timeout)
    if backend is not None:
        _check_backend(backend)
    environ = os.environ if environ is None else environ
    if dist.is_available() and dist.is_initialized():
        return _adopt(backend, device, environ)
    launch = detect(environ)
    place = _device(device, launch.local_rank)
    if not launch.needs_group:
        return Ranks(launch.rank, launch.world_size, launch.local_rank, place, None, False)
    backend = _backend_of(place) if backend is None else backend
    _check_fits(backend, place, f"backend={backend!r}")
    if "nccl" in _backends(backend) and not dist.is_nccl_available():
        raise ValueError(f"backend={backend!r}: this torch was built without nccl; use gloo")
    if is_accelerator(place):
        torch.accelerator.set_device_index(place.index)  # nccl uses the current device
    _initialise(backend, launch, place, limit)
    presence()  # from here on the others hear of this rank
    return Ranks(launch.rank, launch.world_size, launch.local_rank, place, dist.group.WORLD, True)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: timedelta = DEFAULT_TIMEOUT,
    **ignored: Any,
) -> None:
    """Join the other ranks now rather than in ``initialize()``, which then finds the process group.

    Args:
        dist_backend: backend of torch.distributed; by default nccl for CUDA, gloo for the CPU.
        auto_mpi_discovery: accepted; launchers are always detected.
        distributed_port: port of rank 0, if no launcher names one.
        verbose: accepted; nothing is printed.
        timeout: timeout of each collective.

    Raises:
        ValueError: launcher variables contradict each other, or an argument is not supported.
        RendezvousError: the other ranks did not join in time.
    """
    if ignored:
        raise ValueError(f"init_distributed() does not support {', '.join(sorted(ignored))}; leave it out")
    join(backend=dist_backend, timeout=timeout, environ=with_port(distributed_port))


def with_port(port: int | None) -> Mapping[str, str]:
    """Return the process's environment; ``port`` is rank 0's if there are several ranks and no launcher names one."""
    return os.environ if port is None or "WORLD_SIZE" not in os.environ else {"MASTER_PORT": str(port), **os.environ}


def expected_world_size(environ: Mapping[str, str] | None = None) -> int:
    """Return the number of ranks that :func:`join` will find.

    Raises:
        ValueError: variables are only partly set or contradict each other.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return detect(os.environ if environ is None else environ).world_size


def _adopt(backend: str | None, device: str | torch.device | None, environ: Mapping[str, str]) -> Ranks:
    """Use the process group that other code initialised, whatever the variables say."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = str(dist.get_backend_config())
    if backend is not None and not _backends(backend) <= _backends(found):
        raise ValueError(
            f"backend={backend!r} was asked for, and the process group is already initialised with {found!r}: "
            f"leave backend out, or initialise the group with it"
        )
    set_by_launcher = next((environ[name] for name in LOCAL_RANK_NAMES if environ.get(name, "").isdigit()), None)
    if set_by_launcher is not None:
        local_rank = int(set_by_launcher)  # without asking the driver, which a forked process could not
    else:
        # Code that initialised the group without a launcher has chosen the device before.
        local_rank = rank if accelerator_type() is None else torch.accelerator.current_device_index()
    place = _device(device, local_rank)
    _check_fits(found, place, f"the process group, initialised with {found!r},")
    if is_accelerator(place):
        torch.accelerator.set_device_index(place.index)
    presence()
    return Ranks(rank, world_size, local_rank, place, dist.group.WORLD, False)


def _checked_timeout(timeout: timedelta | float) -> timedelta:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not is_number(seconds):
        raise TypeError(f"timeout is a timedelta or a number of seconds, not {type(timeout).__name__}")
    if not 0 < seconds < timedelta.max.total_seconds():
        raise ValueError(f"timeout must be above 0 seconds, and is {timeout}")
    return timedelta(seconds=seconds)


def _backends(config: str) -> set[str]:
    """Return ``{"gloo", "nccl"}`` for ``"cpu:gloo,cuda:nccl"``."""
    return {part.rpartition(":")[2].strip() for part in config.lower().split(",")}


def _check_backend(backend: str) -> None:
    if not isinstance(backend, str):
        raise TypeError(f"backend is a name such as 'nccl' or 'gloo', not {type(backend).__name__}")
    known = {str(each) for each in dist.Backend.backend_list if each != "undefined"}
    for each in sorted(_backends(backend) - known):
        raise ValueError(f"backend={backend!r}: {each!r} is not known; {did_you_mean(each, known)}")


def _backend_of(device: torch.device) -> str:
    try:
        return dist.get_default_backend_for_device(device.type)
    except ValueError as error:
        raise ValueError(f"no backend is known for {device.type} devices: give backend=") from error


def _check_fits(config: str, device: torch.device, what: str) -> None:
    """Raise ValueError for backends that would fail at the device's first collective, as nccl alone on the CPU."""
    parts = [part.partition(":") for part in config.lower().split(",")]
    serves = {right if colon else left for left, colon, right in parts if not colon or left == device.type}
    if not serves or (device.type == "cpu" and serves == {"nccl"}):
        raise ValueError(f"{what} cannot reduce tensors of the {device.type}: use gloo there, nccl for CUDA")


def _device(device: str | torch.device | None, local_rank: int) -> torch.device:
    if device is None:
        device = accelerator_type() or "cpu"
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device is a name or a torch.device, not {type(device).__name__}")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is not a device: {str(error).splitlines()[0]}") from error
    if place.type != accelerator_type() and place.type != "cuda":  # without CUDA, the error below says so
        return place
    count = torch.accelerator.device_count() if place.type == accelerator_type() else 0
    # If a scheduler shows each rank only its own device, that one has index 0.
    index = place.index if place.index is not None else 0 if count == 1 else local_rank
    if index >= count:
        kind = place.type.upper()
        raise ValueError(
            f"local rank {local_rank} asks for {place.type}:{index}, and this process sees {count} {kind} devices: "
            f"start fewer ranks on this machine, or check the variable that hides devices (CUDA_VISIBLE_DEVICES)"
        )
    return torch.device(place.type, index)


def _initialise(backend: str, launch: Launch, place: torch.device, timeout: timedelta) -> None:
    host, port = launch.master_addr or "", launch.master_port or 0

    def make() -> None:
        if is_accelerator(place):
            torch.accelerator.set_device_index(place.index)  # this is another thread
        # No device_id: later groups, also a user's of some ranks, would be split off this one by all of its ranks.
        dist.init_process_group(backend, store=own, rank=launch.rank, world_size=launch.world_size, timeout=timeout)

    try:
        # As env:// does, this uses torchrun's own store if there is one.
        start = Start(
            store_at(host, port, launch.rank, launch.world_size, timeout), launch.rank, launch.world_size, timeout
        )
        own = start.meet()
        start.connect(own, make)
    except (RuntimeError, OSError) as error:  # these include torch's DistError and timeouts
        forget_stores()
        raise RendezvousError(
            f"rank {launch.rank} of {launch.world_size} ({launch.launcher} variables) did not meet the others at "
            f"{f'[{host}]' if ':' in host else host}:{port} within {timeout.total_seconds():g} s: "
            f"{str(error).splitlines()[0].rstrip('.')}. "
            "Check that all ranks were started (in a Slurm job: with srun), that each reaches that host and port, and "
            "any port of any other host (no firewall between them; host names that are not 127.0.1.1 in /etc/hosts; "
            "GLOO_SOCKET_IFNAME names the network interface); for one rank alone set RANK=0 and WORLD_SIZE=1"
        ) from error

"""The ranks of a run, joined by the launcher's variables or taken from an existing process group."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from longshore.accelerator import accelerator_type, is_accelerator
from longshore.engine.launch import LOCAL_RANK_NAMES, Launch, detect
from longshore.engine.rendezvous import Start, forget_stores, store_at
from longshore.engine.wording import did_you_mean, is_number
from longshore.errors import LongshoreError
from longshore.ranks.presence import presence
from longshore.ranks.waiting import gather_from_all

T = TypeVar("T")

DEFAULT_TIMEOUT = timedelta(minutes=30)


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
    Open MPI, PMI or Slurm identify this rank (:mod:`longshore.engine.launch`); without any, this is the only rank, and
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

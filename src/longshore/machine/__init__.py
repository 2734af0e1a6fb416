"""CPUs, GPUs and limits of this machine, as Linux reports them, and the CPUs that processes are bound to.

A fact that the system does not provide is None. Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"
_RANK_VARIABLES = (b"LOCAL_RANK=", b"SLURM_LOCALID=", b"OMPI_COMM_WORLD_LOCAL_RANK=", b"MPI_LOCALRANKID=")


@dataclass(frozen=True)
class LogicalCpu:
    """A logical CPU, the unit to which Linux assigns threads."""

    number: int  # Linux's number
    core: int  # the smallest number among the logical CPUs of the same core (SMT siblings)
    node: int | None  # NUMA node; None: not known


@dataclass(frozen=True)
class Topology:
    """The CPUs that this process may use."""

    cpus: tuple[LogicalCpu, ...]  # sorted by number
    narrowed: bool  # whether the machine has more CPUs, because the process already has an affinity or a cpuset
    quota: float | None  # CPU time that a container grants to all of its processes, in CPUs; None: no limit

    @property
    def nodes(self) -> tuple[int | None, ...]:
        """NUMA nodes of the CPUs, sorted; None comes last and stands for all unknown nodes."""
        found = {cpu.node for cpu in self.cpus}
        return (*sorted(node for node in found if node is not None), *([None] if None in found else []))


def usable_cpus() -> list[int]:
    """Return the numbers of the logical CPUs that this process may use, sorted."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def read_topology(root: Path = Path("/"), usable: Collection[int] | None = None) -> Topology:
    """Read which CPUs share a core and which NUMA nodes they are on.

    If Linux does not provide this, each CPU counts as a core of its own whose node is not known.

    Args:
        root: the folder that contains ``sys``.
        usable: numbers of logical CPUs; None: the CPUs that this process may use.
    """
    numbers = usable_cpus() if usable is None else sorted(usable)
    cpus = root / "sys/devices/system/cpu"
    node_of: dict[int, int] = {}
    for folder in root.glob("sys/devices/system/node/node[0-9]*"):
        for cpu in parse_cpu_list(text_of(folder / "cpulist")):
            node_of[cpu] = int(folder.name.removeprefix("node"))
    found = []
    for number in numbers:
        about = cpus / f"cpu{number}/topology"
        # Before Linux 5, the file was named thread_siblings_list.
        siblings = parse_cpu_list(text_of(about / "core_cpus_list") or text_of(about / "thread_siblings_list"))
        found.append(LogicalCpu(number, min(siblings, default=number), node_of.get(number)))
    online = parse_cpu_list(text_of(cpus / "online"))
    narrowed = bool(set(online) - set(numbers)) if online else len(numbers) < (os.cpu_count() or 1)
    return Topology(tuple(found), narrowed, cpu_quota(root))


def parse_cpu_list(text: str) -> list[int]:
    """Parse ``"0-2,5"`` to ``[0, 1, 2, 5]``; other text gives an empty list."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            return []
        numbers.extend(range(int(first), int(last if dash else first) + 1))
    return numbers


def cpu_list(numbers: Iterable[int]) -> str:
    """Format ``[0, 1, 2, 5]`` as ``"0-2,5"``."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def pci_address(properties: object) -> str | None:
    """Return the PCI address, such as ``0000:3b:00.0``, from the result of ``torch.cuda.get_device_properties``; None
    if that does not have it."""
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return None if None in numbers else "{:04x}:{:02x}:{:02x}.0".format(*numbers)


def pci_folder(address: str, root: Path = Path("/")) -> Path:
    """Return the folder in which Linux describes a PCI device."""
    return root / "sys/bus/pci/devices" / address


def numa_node_of(address: str | None, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of a PCI device; None: it is not known, or the machine has only one node (-1)."""
    if address is None:
        return None
    node = text_of(pci_folder(address, root) / "numa_node").strip()
    return int(node) if node.isdigit() else None


def visible_gpus() -> dict[str, str | None]:
    """Return the PCI addresses of the CUDA devices that this process sees, by name (``cuda:0``); None: it is not known.
    Imports torch."""
    import torch

    if not torch.cuda.is_available():
        return {}
    count = torch.cuda.device_count()
    return {f"cuda:{index}": pci_address(torch.cuda.get_device_properties(index)) for index in range(count)}


def hidden_gpus(visible: Collection[str | None], root: Path = Path("/")) -> list[str]:
    """Return the PCI addresses of NVIDIA GPUs that are not among ``visible``; none where one of these is not known, as
    it may be any of them."""
    return [] if None in visible else [address for address in all_gpus(root) if address not in visible]


def all_gpus(root: Path = Path("/")) -> list[str]:
    """Return the PCI addresses of all NVIDIA GPUs, including those that a container or a variable hides."""
    found = []
    for folder in sorted(root.glob("sys/bus/pci/devices/*")):
        is_display = text_of(folder / "class").startswith(_DISPLAY_CLASS)
        if is_display and text_of(folder / "vendor").strip() == _NVIDIA:
            found.append(folder.name)
    return found


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the CPU time that a container grants to all of its processes together, in CPUs; None: no limit."""
    limit, _, period = text_of(root / "sys/fs/cgroup/cpu.max").strip().partition(" ")
    if not limit:  # cgroups of version 1
        limit, period = (text_of(root / f"sys/fs/cgroup/cpu/cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    return int(limit) / int(period) if limit.isdigit() and period.isdigit() and int(period) > 0 else None


def locked_limit_bytes() -> int | None:
    """Return how much memory this process may lock (pin), in bytes; None: no limit."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def available_bytes() -> int:
    """Return how many bytes of host memory can be allocated now without swapping."""
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def shared_free_bytes(root: Path = Path("/")) -> int | None:
    """Return the free bytes in ``dev/shm``, where ranks of one machine exchange gradients; None: it does not exist."""
    shared = root / "dev/shm"
    return shutil.disk_usage(shared).free if shared.is_dir() else None


def text_of(path: Path) -> str:
    """Return a file's text, or ``""`` if it cannot be read: some systems do not have the file."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


class BoundThreads:
    """Binding of this process's threads to CPUs until :meth:`release`; threads that they start are bound, too.

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
        """Restore the former affinity of all threads whose affinity was not changed in the meantime."""
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
    """Return the CPUs that ranks of other runs are bound to, by process ID.

    A rank is a process with a launcher's environment variables.

    Args:
        usable: the CPUs of this process; a process that may use all of them is not bound.
        root: the folder that contains ``proc``.
    """
    found = {}
    for folder in root.glob("proc/[0-9]*"):
        number = int(folder.name)
        if number == os.getpid():
            continue
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            cpus = frozenset(os.sched_getaffinity(number)) & frozenset(usable)
            if cpus and len(cpus) < len(usable):
                environ = (folder / "environ").read_bytes().split(b"\0")
                if any(entry.startswith(_RANK_VARIABLES) for entry in environ):
                    found[number] = cpus
    return found


def machine_identity(root: Path = Path("/")) -> str:
    """Return a text that is the same for all processes of one running system, in any container."""
    return text_of(root / "proc/sys/kernel/random/boot_id").strip() or os.uname().nodename

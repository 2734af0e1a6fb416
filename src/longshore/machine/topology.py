"""The logical CPUs that this process may use: which share a core, and which NUMA node each is on."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from longshore.machine.limits import cpu_quota, text_of


@dataclass(frozen=True)
class LogicalCpu:
    """What Linux schedules on.

    Attributes:
        number: as Linux counts them.
        core: the smallest number among the logical CPUs of the same core (SMT siblings).
        node: its NUMA node; None: not told.
    """

    number: int
    core: int
    node: int | None


@dataclass(frozen=True)
class Topology:
    """The CPUs of this process.

    Attributes:
        cpus: those that it may use, in order.
        narrowed: the machine has more: an affinity or a cpuset was given already.
        quota: CPUs' worth of time that a container grants to all of its processes; None: all of it.
    """

    cpus: tuple[LogicalCpu, ...]
    narrowed: bool
    quota: float | None

    @property
    def nodes(self) -> tuple[int | None, ...]:
        """NUMA nodes of usable CPUs, in order; those that are not told, as one, last."""
        found = {cpu.node for cpu in self.cpus}
        return (*sorted(node for node in found if node is not None), *([None] if None in found else []))


def usable_cpus() -> list[int]:
    """The logical CPUs that this process may use, in order."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def read_topology(root: Path = Path("/"), usable: Collection[int] | None = None) -> Topology:
    """From Linux's files; what they do not tell is left open: each CPU is then a core of its own, on no known node.

    Args:
        root: where ``sys`` is.
        usable: logical CPUs; None: those of this process.
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
        # The second is the name before Linux 5.
        siblings = parse_cpu_list(text_of(about / "core_cpus_list") or text_of(about / "thread_siblings_list"))
        found.append(LogicalCpu(number, min(siblings, default=number), node_of.get(number)))
    online = parse_cpu_list(text_of(cpus / "online"))
    narrowed = bool(set(online) - set(numbers)) if online else len(numbers) < (os.cpu_count() or 1)
    return Topology(tuple(found), narrowed, cpu_quota(root))


def parse_cpu_list(text: str) -> list[int]:
    """``"0-2,5"`` as ``[0, 1, 2, 5]``; empty for what is no such list."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            return []
        numbers.extend(range(int(first), int(last if dash else first) + 1))
    return numbers


def cpu_list(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` as ``"0-2,5"``."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)

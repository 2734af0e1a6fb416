"""Machines for tests: as files, and as topologies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from longshore.machine import LogicalCpu, Topology, cpu_list
from longshore.machine.binding import RankDevice


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def two_sockets_with_smt(cores: int) -> dict[str, str]:
    """``cores`` on each node; the siblings are numbered after all cores, as Linux does."""
    files = {"sys/devices/system/cpu/online": f"0-{4 * cores - 1}\n"}
    for node in (0, 1):
        first = node * cores
        numbers = [*range(first, first + cores), *range(2 * cores + first, 2 * cores + first + cores)]
        files[f"sys/devices/system/node/node{node}/cpulist"] = cpu_list(numbers) + "\n"
        for core in range(first, first + cores):
            for number in (core, core + 2 * cores):
                files[f"sys/devices/system/cpu/cpu{number}/topology/core_cpus_list"] = f"{core},{core + 2 * cores}\n"
    return files


def machine(
    nodes: int = 1, cores: int = 8, smt: int = 1, told: bool = True, usable: Sequence[int] | None = None,
    quota: float | None = None,
) -> Topology:  # fmt: skip
    """``cores`` on each node, ``smt`` logical CPUs a core, siblings after all cores."""
    total = nodes * cores
    cpus = [
        LogicalCpu(core + total * sibling, core, core // cores if told else None)
        for sibling in range(smt)
        for core in range(total)
    ]
    kept = [cpu for cpu in cpus if usable is None or cpu.number in usable]
    return Topology(tuple(kept), narrowed=len(kept) < len(cpus), quota=quota)


def gpus(*nodes: int | None) -> list[RankDevice]:
    """One for each node that is named, in the order of their addresses."""
    return [RankDevice(f"cuda:{index}", f"0000:{index + 16:02x}:00.0", node) for index, node in enumerate(nodes)]


def cpu_ranks(count: int) -> list[RankDevice]:
    return [RankDevice() for _ in range(count)]

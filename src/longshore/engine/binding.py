"""Binding of a rank to CPUs, unless ``longshore launch`` did it, and the choice of its host threads.

The ranks of a machine exchange which CPUs they may use, and each computes the same plan. Either all of them bind
themselves or none does, and no rank takes a CPU that was given to another process. The number of torch's threads stays
as it is, since sums computed by torch depend on it; so no rank is bound if one would get fewer CPUs than torch has
threads.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from longshore.engine.config.model import Config
from longshore.engine.ranks import Ranks, detect
from longshore.machine import (
    BoundThreads,
    Topology,
    cpu_list,
    cpus_of_other_ranks,
    hidden_gpus,
    machine_identity,
    numa_node_of,
    parse_cpu_list,
    pci_address,
    read_topology,
    usable_cpus,
    visible_gpus,
)
from longshore.machine.binding import RankBinding, RankDevice, binding_of, binding_wanted, plan_ranks

_LOGGER = logging.getLogger("longshore")
_LEAST_CORES = 4
"""Fewest cores of a rank. With fewer, a CPU that another rank leaves idle is worth more than locality."""


class Neighbours(NamedTuple):
    """Numbers of ranks on one machine, including this one."""

    on_machine: int
    on_cpus: int
    """Number of ranks that may use the same CPUs; a launcher may have given each its own."""
    place: int
    """Index of this rank among those that may use the same CPUs."""


@dataclass
class Binding:
    """The CPUs on which a rank's threads run."""

    text: str  # one line with the CPUs and the reason
    host_threads: int | None  # number of threads of the host step; None: not chosen here
    threads: BoundThreads | None  # the threads that the engine bound; None: none
    neighbours: Neighbours  # the ranks that share the machine's memory and CPUs

    def release(self) -> None:
        """Undo the engine's binding, so that threads may use their former CPUs again; a second call does nothing."""
        if self.threads is not None:
            self.threads.release()
            self.threads = None


@dataclass(frozen=True)
class Situation:
    """Information that one rank gives the others about its machine.

    ``cpus`` are logical CPUs that the rank may use, as text; ``occupied`` are those to which ranks of other runs were
    bound.
    """

    machine: str  # the same for all ranks of one machine
    refusal: str = ""  # why this rank cannot be bound; empty: it can
    asked: bool = False  # LONGSHORE_BIND=1 is set
    cpus: str = ""
    occupied: str = ""
    torch_threads: int = 1
    device: tuple[str, str | None, int | None] = ("cpu", None, None)  # its name, PCI address and NUMA node
    visible: tuple[str | None, ...] = ()  # PCI addresses of the GPUs that the rank sees; None: not known


def bind(config: Config, ranks: Ranks, environ: Mapping[str, str], root: Path = Path("/")) -> Binding:
    """Bind this rank to CPUs where that is safe and helps; all ranks have to call.

    Args:
        environ: a launcher's variables, and ``LONGSHORE_BIND``: 0: never bind; 1: also bind to few cores.
        root: parent folder of ``proc`` and ``sys``.

    Raises:
        ValueError: a variable of longshore has an invalid value.
    """
    launched = binding_of(environ)
    topology = read_topology(root)
    mine = _situation(config, ranks, environ, topology, root)
    here = {rank: row for rank, row in enumerate(ranks.gather(mine)) if row.machine == mine.machine}
    sharing = [rank for rank, row in here.items() if row.cpus == mine.cpus]
    threads: BoundThreads | None = None
    if launched is not None:
        now = usable_cpus()
        moved = f"; since then moved to CPU {cpu_list(now)}" if launched.cpus and now != list(launched.cpus) else ""
        text, host_threads = f"longshore launch: {launched}{moved}", launched.host_threads
    else:
        chosen = plan_or_refusal(list(here.values()), list(here).index(ranks.rank), topology, root)
        text, host_threads = f"not bound to CPUs ({chosen})", None
        if isinstance(chosen, RankBinding):
            try:
                threads, sharing = BoundThreads(chosen.cpus), [ranks.rank]
                text, host_threads = str(chosen), chosen.host_threads
            except OSError as error:
                text = f"not bound to CPUs ({error})"
    _LOGGER.info("rank %d: %s", ranks.rank, text)
    return Binding(text, host_threads, threads, Neighbours(len(here), len(sharing), sharing.index(ranks.rank)))


def plan_or_refusal(
    rows: Sequence[Situation], place: int, topology: Topology, root: Path = Path("/")
) -> RankBinding | str:
    """Return the CPUs of one rank, or why it is not bound; each rank of a machine computes the same plan. ``rows``
    describe the machine's ranks, in order, and ``place`` is the index of this rank."""
    mine = rows[place]
    if mine.refusal:
        return mine.refusal
    for row in rows:
        if row.refusal:
            return f"another rank of this machine is not: {row.refusal}"
        if row.cpus != mine.cpus:
            return f"ranks of this machine may use different CPUs, {mine.cpus} and {row.cpus}"
    visible = {address for row in rows for address in row.visible}
    hidden = [RankDevice("unseen", each, numa_node_of(each, root)) for each in hidden_gpus(visible, root)]
    plan = plan_ranks(topology, [RankDevice(*row.device) for row in rows], hidden)
    core_of = {cpu.number: cpu.core for cpu in topology.cpus}
    cores = min(len({core_of[cpu] for cpu in each.cpus}) for each in plan)
    if cores < _LEAST_CORES and not all(row.asked for row in rows):
        return f"a rank's part would be as small as {cores} of {len(set(core_of.values()))} cores"
    for row, each in zip(rows, plan, strict=True):
        if row.torch_threads > len(each.cpus):
            return f"torch has {row.torch_threads} threads on a rank whose part is {len(each.cpus)} CPUs"
    occupied = {cpu for row in rows for cpu in parse_cpu_list(row.occupied)}
    taken = occupied & {cpu for each in plan for cpu in each.cpus}
    if taken:
        return f"ranks of another run were bound to CPU {cpu_list(taken)}"
    return plan[place]


def _situation(config: Config, ranks: Ranks, environ: Mapping[str, str], topology: Topology, root: Path) -> Situation:
    cpus = [cpu.number for cpu in topology.cpus]
    machine, asked = machine_identity(root), binding_wanted(environ)
    if refusal := _refusal(config, ranks, environ, topology, asked):
        return Situation(machine, refusal, cpus=cpu_list(cpus))
    occupied = {cpu for each in cpus_of_other_ranks(cpus).values() for cpu in each}
    device, visible = ("cpu", None, None), ()
    if ranks.device.type == "cuda":
        address = pci_address(torch.cuda.get_device_properties(ranks.device))
        device, visible = (str(ranks.device), address, numa_node_of(address, root)), tuple(visible_gpus().values())
    threads = torch.get_num_threads()
    return Situation(machine, "", bool(asked), cpu_list(cpus), cpu_list(occupied), threads, device, visible)


def _refusal(config: Config, ranks: Ranks, environ: Mapping[str, str], topology: Topology, asked: bool | None) -> str:
    if binding_of(environ) is not None:
        return "longshore launch started it"
    if asked is False:
        return "LONGSHORE_BIND=0"
    if ranks.device.type != "cpu" and config.offload_device != "cpu":
        return "no host thread steps"
    if config.cpu_set is not None:
        return f"cpu_set names CPU {cpu_list(config.cpu_set)}"
    try:
        launcher = detect(environ).launcher
    except ValueError:  # join() took the ranks of an existing process group
        launcher = "none"
    if launcher == "none":
        return "no launcher started it, so other processes may need CPUs"
    if topology.narrowed:
        return f"something gave it CPU {cpu_list(cpu.number for cpu in topology.cpus)} already"
    return ""


def host_cpus(
    config: Config, neighbours: Neighbours, granted: int | None = None
) -> tuple[int | None, tuple[int, ...] | None]:
    """Choose ``threads`` and ``cpu_set`` of :class:`longshore.Offload`: the configured ones; otherwise as many threads
    as were ``granted`` when this rank was bound; otherwise an equal share for each rank that may use the same CPUs."""
    if config.threads is not None or config.cpu_set is not None:
        return config.threads, config.cpu_set
    if config.cpu_share is None and granted is not None:
        return granted, None
    cpus = usable_cpus()
    if config.cpu_share is None:
        return max(1, len(cpus) // neighbours.on_cpus), None
    # If there are more ranks than CPUs, some ranks share a CPU.
    first = neighbours.place * len(cpus) // neighbours.on_cpus
    end = max(first + 1, (neighbours.place + 1) * len(cpus) // neighbours.on_cpus)
    count = max(1, round(config.cpu_share * (end - first)))
    return count, tuple(cpus[end - count : end])

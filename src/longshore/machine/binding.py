"""Plan the CPUs and the number of threads of each rank of a machine, as pure functions of its topology.

A rank with a GPU gets whole cores of the NUMA node that the GPU is attached to, since gradients and parameters pass
between the two at every step. Memory needs no policy of its own: Linux allocates memory on the node of the CPU that
first touches it, so it is enough to bind a rank before it touches its memory. A strict policy (``MPOL_BIND``) would
end a run whose optimizer state does not fit on its node; the default policy then uses memory of another node.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from longshore.machine import LogicalCpu, Topology, cpu_list

VARIABLE = "LONGSHORE_BINDING"
"""Environment variable in which ``longshore launch`` passes a rank its binding, as JSON."""

BIND_VARIABLE = "LONGSHORE_BIND"
"""Environment variable: 0 never binds ranks; 1 binds them even if the engine would not do so by default."""

_CORES_TO_SPARE = 4
"""Number of cores from which a rank with a GPU leaves one core to the thread that feeds the GPU."""


@dataclass(frozen=True)
class RankDevice:
    """The device that a rank trains on."""

    name: str = "cpu"  # or "cuda:0"
    address: str | None = None  # PCI address, by which the GPUs of a node are sorted; None: a CPU, or not known
    node: int | None = None  # the NUMA node that the GPU is attached to; None: not known

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"


@dataclass(frozen=True)
class RankBinding:
    """The CPUs and threads of one rank."""

    device: str  # the device that the rank trains on
    nodes: tuple[int, ...]  # NUMA nodes of its CPUs; empty: not known
    cpus: tuple[int, ...]  # logical CPUs; empty: the rank is not bound
    torch_threads: int  # threads of torch's CPU operators; the same for all ranks, because sums depend on it
    host_threads: int  # threads of the host step
    why: tuple[str, ...]  # reasons, for users

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        because = f" ({self.reasons})" if self.why else ""
        node = f" of NUMA node {cpu_list(self.nodes)}" if self.nodes else ""
        where = f"bound to CPU {cpu_list(self.cpus)}{node}" if self.cpus else "not bound to CPUs"
        return f"{where}; host step {_count(self.host_threads, 'thread')}{because}"

    @property
    def reasons(self) -> str:
        return "; ".join(self.why)


def binding_of(environ: Mapping[str, str]) -> RankBinding | None:
    """Return the binding that ``longshore launch`` chose for this process; None if another program started it.

    Raises:
        ValueError: the variable is not a valid binding.
    """
    if (text := environ.get(VARIABLE)) is None:
        return None
    # Imported here, since most processes have no such variable and need not wait for the import.
    from pydantic import TypeAdapter

    try:
        binding = TypeAdapter(RankBinding).validate_json(text, strict=True)
        if min(binding.torch_threads, binding.host_threads) < 1:
            raise ValueError("threads")
        return binding
    except ValueError as error:
        raise ValueError(
            f"{VARIABLE} is set by longshore launch for its ranks, and {text!r} is not valid; unset it"
        ) from error


def binding_wanted(environ: Mapping[str, str]) -> bool | None:
    """Return whether the user wants ranks to be bound to CPUs; None if the user did not say.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    text = environ.get(BIND_VARIABLE, "").strip()
    if text not in ("", "0", "1"):
        raise ValueError(f"{BIND_VARIABLE} must be 0 or 1, and is {text!r}")
    return bool(int(text)) if text else None


def plan_ranks(
    topology: Topology,
    devices: Sequence[RankDevice],
    hidden: Sequence[RankDevice] = (),
    omp_num_threads: str | None = None,
) -> tuple[RankBinding, ...]:
    """Plan a binding for each rank of one machine.

    Args:
        topology: the CPUs that may be used.
        devices: the device of each rank, by local rank.
        hidden: GPUs that this run does not see. Other runs are assumed to use them and get their part of the CPUs.
            They are ignored if ``devices`` has no GPU.
        omp_num_threads: the value of ``OMP_NUM_THREADS``, if it is set; torch then gets that many threads.

    Raises:
        ValueError: there is no rank, or no CPU.
    """
    if not devices or not topology.cpus:
        raise ValueError(
            f"a plan needs ranks and CPUs, and there are {len(devices)} ranks and {len(topology.cpus)} CPUs"
        )
    others = list(hidden) if any(device.is_gpu for device in devices) else []
    homes, whys = _homes(topology, devices, others)
    granted = None if topology.quota is None else max(1, math.floor(topology.quota / len(devices)))
    bindings = []
    for rank, (device, home, why) in enumerate(zip(devices, homes, whys, strict=True)):
        # Devices that share these nodes, with their local ranks (-1: of another run), in the same order in all runs.
        sharing = [(each, number) for number, each in enumerate(devices) if homes[number] == home]
        sharing += [(each, -1) for each in others if (each.node,) == home]
        sharing.sort(key=lambda pair: (pair[0].address is None, pair[0].address or "", pair[1]))
        ranks = [number for _, number in sharing]
        part, how = _part([cpu for cpu in topology.cpus if cpu.node in home], ranks.index(rank), len(ranks))
        why += [how] if how else []
        if -1 in ranks and device.is_gpu:
            why.append(f"{_count(ranks.count(-1), 'part')} left to GPUs that this run does not see")
        bindings.append(_with_threads(device, part, why, granted))
    # All ranks get the same number of torch threads, since sums in torch depend on it.
    asked = (omp_num_threads or "").partition(",")[0].strip()
    if asked.isdigit() and int(asked) > 0:
        set_by_user = f"OMP_NUM_THREADS={omp_num_threads} was set"
        return tuple(replace(each, torch_threads=int(asked), why=(*each.why, set_by_user)) for each in bindings)
    threads = min(each.torch_threads for each in bindings)
    return tuple(replace(each, torch_threads=threads) for each in bindings)


def unbound(binding: RankBinding, why: str) -> RankBinding:
    """Return the same binding without CPUs: the rank's threads may run on any CPU."""
    return replace(binding, nodes=(), cpus=(), why=(why,))


_Home = tuple[int | None, ...]


def _homes(
    topology: Topology, devices: Sequence[RankDevice], others: Sequence[RankDevice]
) -> tuple[list[_Home], list[list[str]]]:
    """Return the NUMA nodes of each rank, and the reasons for them."""
    nodes = topology.nodes
    homes: list[_Home | None] = []
    whys: list[list[str]] = []
    for device in devices:
        known = device.node is not None and device.node in nodes
        homes.append((device.node,) if known else None)
        if known:
            whys.append([f"next to {device.name}"])
        elif device.node is not None:
            whys.append([f"{device.name} is next to NUMA node {device.node}, whose CPUs may not be used"])
        else:
            whys.append([f"the NUMA node of {device.name} is not known"] if device.is_gpu else [])
    away = [number for number, home in enumerate(homes) if home is None]
    if len(away) == len(devices) and len(devices) < len(nodes):
        # With fewer ranks than nodes, each rank gets several nodes, so that all memory is used.
        for number in away:
            first, end = (place * len(nodes) // len(devices) for place in (number, number + 1))
            homes[number] = nodes[first:end]
    else:
        for number, node in zip(away, _emptiest(topology, homes, others, len(away)), strict=True):
            homes[number] = (node,)
    return [home for home in homes if home is not None], whys


def _emptiest(
    topology: Topology, homes: Sequence[_Home | None], others: Sequence[RankDevice], count: int
) -> list[int | None]:
    """Choose a node for each of ``count`` ranks whose device has none, so that ranks share cores evenly; sorted."""
    nodes = topology.nodes
    cores = {node: len({cpu.core for cpu in topology.cpus if cpu.node == node}) for node in nodes}
    ranks = {node: homes.count((node,)) + sum(other.node == node for other in others) for node in nodes}
    chosen = []
    for _ in range(count):
        node = max(nodes, key=lambda node: cores[node] / (ranks[node] + 1))  # the first one of several equal nodes
        ranks[node] += 1
        chosen.append(node)
    return sorted(chosen, key=nodes.index)


def _part(cpus: Sequence[LogicalCpu], place: int, count: int) -> tuple[tuple[LogicalCpu, ...], str]:
    """Return one of ``count`` equal parts: whole cores if there are enough, else logical CPUs, else one shared CPU."""
    cores: dict[int, list[LogicalCpu]] = {}
    for cpu in cpus:
        cores.setdefault(cpu.core, []).append(cpu)
    units = list(cores.values())
    how = f"part {place + 1} of {count}" if count > 1 else ""
    if len(units) < count:
        units = [[cpu] for unit in units for cpu in unit]
        how = f"{_count(count, 'part')} of {_count(len(cores), 'core')}, so cores are shared"
    first, end = (each * len(units) // count for each in (place, place + 1))
    if len(units) < count:
        end = first + 1
        how = f"{_count(count, 'part')} of {_count(len(cpus), 'CPU')}, so CPUs are shared"
    return tuple(cpu for unit in units[first:end] for cpu in unit), how


def _with_threads(
    device: RankDevice, part: Sequence[LogicalCpu], why: Sequence[str], granted: int | None
) -> RankBinding:
    """Choose one thread for each core: a second thread on the same core would wait for the same memory."""
    cores = len({cpu.core for cpu in part})
    reasons = list(why)
    torch_threads = host_threads = cores
    if device.is_gpu and cores >= _CORES_TO_SPARE:
        host_threads -= 1
        reasons.append(f"one core left to the thread that feeds {device.name}")
    if granted is not None and granted < cores:
        torch_threads, host_threads = min(torch_threads, granted), min(host_threads, granted)
        reasons.append(f"the container's time is enough for {_count(granted, 'thread')} a rank")
    nodes = tuple(sorted({cpu.node for cpu in part if cpu.node is not None}))
    cpus = tuple(sorted(cpu.number for cpu in part))
    return RankBinding(device.name, nodes, cpus, torch_threads, host_threads, tuple(reasons))


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

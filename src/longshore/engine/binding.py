"""Where ``longshore launch`` did not bind a rank to CPUs: the engine does so itself, or says why it does not.

The ranks of a machine tell each other what they may use and have, and each makes the same plan of it. They bind
themselves all or none, and only where none takes a CPU that someone gave to somebody else. torch's threads stay as
many as they are, since what torch adds up depends on them; so a part with fewer CPUs than torch has threads is no part.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from longshore.engine.config import Config
from longshore.engine.launch import detect
from longshore.engine.ranks import Ranks
from longshore.engine.same_setup import bytes_of_all_ranks
from longshore.machine import (
    BoundThreads,
    RankBinding,
    RankDevice,
    Topology,
    all_gpus,
    binding_of,
    binding_wanted,
    cpu_list,
    cpus_of_other_ranks,
    machine_identity,
    numa_node_of,
    parse_cpu_list,
    pci_address,
    plan_ranks,
    read_topology,
    usable_cpus,
    visible_gpus,
)

_LOGGER = logging.getLogger("longshore")
_MESSAGE_BYTES = 4096
_LEAST_CORES = 4
"""Of a rank. With fewer, a CPU that another rank leaves idle is worth more than staying near."""


class Binding:
    """Where a rank's threads run.

    Attributes:
        text: one line that says where, and why.
        host_threads: of the host step; None: nobody chose.
    """

    def __init__(self, text: str, host_threads: int | None = None, threads: BoundThreads | None = None) -> None:
        self.text = text
        self.host_threads = host_threads
        self._threads = threads

    def release(self) -> None:
        """Threads go back to where they were before the engine bound them; again is nothing."""
        if self._threads is not None:
            self._threads.release()
            self._threads = None


@dataclass(frozen=True)
class Situation:
    """What one rank tells the others of its machine.

    Attributes:
        machine: the same for all ranks of one machine.
        refusal: why this rank cannot be bound; empty: it can.
        asked: LONGSHORE_BIND=1.
        cpus: logical CPUs that it may use, as a list.
        occupied: those that ranks of other runs were bound to, as a list.
        torch_threads: that it has.
        device: name, PCI address and NUMA node of what it trains on.
        visible: PCI addresses of the GPUs that it sees.
    """

    machine: str
    refusal: str = ""
    asked: bool = False
    cpus: str = ""
    occupied: str = ""
    torch_threads: int = 1
    device: tuple[str, str | None, int | None] = ("cpu", None, None)
    visible: tuple[str, ...] = ()


def bind(config: Config, ranks: Ranks, environ: Mapping[str, str], root: Path = Path("/")) -> Binding:
    """Bind this rank, where that is safe and helps; all ranks have to call.

    Args:
        environ: a launcher's variables, and ``LONGSHORE_BIND``: 0 for never, 1 for also where parts are small.
        root: where ``proc`` and ``sys`` are.

    Raises:
        ValueError: a variable of ours that is not what it should be.
    """
    launched = binding_of(environ)
    topology = read_topology(root)
    mine = _situation(config, ranks, environ, topology, root)
    rows = [mine] if ranks.world_size == 1 else _of_all(mine, ranks)
    if launched is not None:
        binding = Binding(_as_launched(launched), launched.host_threads)
    else:
        neighbours = [rank for rank, row in enumerate(rows) if row.machine == mine.machine]
        place = neighbours.index(ranks.rank if len(rows) > 1 else 0)
        binding = _own(plan_or_refusal([rows[rank] for rank in neighbours], place, topology, root))
    _LOGGER.info("rank %d: %s", ranks.rank, binding.text)
    return binding


def plan_or_refusal(
    rows: Sequence[Situation], place: int, topology: Topology, root: Path = Path("/")
) -> RankBinding | str:
    """What one rank is bound to, or why it is not. Each of its machine comes to the same plan.

    Args:
        rows: of the ranks of one machine, in order.
        place: of this rank among them.
        topology: of the machine, as all of them see it.
        root: where ``sys`` is.
    """
    mine = rows[place]
    if mine.refusal:
        return mine.refusal
    for row in rows:
        if row.refusal:
            return f"another rank of this machine is not: {row.refusal}"
        if row.cpus != mine.cpus:
            return f"ranks of this machine may use different CPUs, {mine.cpus} and {row.cpus}"
    visible = {address for row in rows for address in row.visible}
    hidden = [RankDevice("unseen", each, numa_node_of(each, root)) for each in all_gpus(root) if each not in visible]
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


def _own(chosen: RankBinding | str) -> Binding:
    if isinstance(chosen, str):
        return Binding(f"not bound to CPUs ({chosen})")
    try:
        threads = BoundThreads(chosen.cpus)
    except OSError as error:
        return Binding(f"not bound to CPUs ({error})")
    return Binding(str(chosen), chosen.host_threads, threads)


def _as_launched(launched: RankBinding) -> str:
    now = usable_cpus()
    moved = bool(launched.cpus) and now != list(launched.cpus)
    return f"longshore launch: {launched}" + (f"; since then moved to CPU {cpu_list(now)}" if moved else "")


def _situation(config: Config, ranks: Ranks, environ: Mapping[str, str], topology: Topology, root: Path) -> Situation:
    machine = machine_identity(root)
    wanted = binding_wanted(environ)
    refusal = _refusal(config, ranks, environ, topology, wanted)
    if refusal:
        return Situation(machine, refusal)
    cpus = [cpu.number for cpu in topology.cpus]
    occupied = {cpu for each in cpus_of_other_ranks(cpus).values() for cpu in each}
    device, visible = ("cpu", None, None), ()
    if ranks.device.type == "cuda":
        address = pci_address(torch.cuda.get_device_properties(ranks.device))
        device, visible = (str(ranks.device), address, numa_node_of(address, root)), tuple(visible_gpus().values())
    return Situation(
        machine, "", bool(wanted), cpu_list(cpus), cpu_list(occupied), torch.get_num_threads(), device, visible
    )


def _refusal(config: Config, ranks: Ranks, environ: Mapping[str, str], topology: Topology, wanted: bool | None) -> str:
    if binding_of(environ) is not None:
        return "longshore launch started it"
    if wanted is False:
        return "LONGSHORE_BIND=0"
    if ranks.device.type != "cpu" and config.offload_device != "cpu":
        return "no host thread steps"
    if config.cpu_set is not None:
        return f"cpu_set names CPU {cpu_list(config.cpu_set)}"
    try:
        launcher = detect(environ).launcher
    except ValueError:  # joining took what a group says, and so do we
        launcher = "none"
    if launcher == "none":
        return "no launcher started it, so there may be other processes to leave room for"
    if topology.narrowed:
        return f"something gave it CPU {cpu_list(cpu.number for cpu in topology.cpus)} already"
    return ""


def _of_all(mine: Situation, ranks: Ranks) -> list[Situation]:
    text = json.dumps(asdict(mine)).encode()
    if len(text) > _MESSAGE_BYTES:
        text = json.dumps(asdict(Situation(mine.machine, "it has more CPUs or GPUs than can be told"))).encode()
    rows = []
    for row in bytes_of_all_ranks(text.ljust(_MESSAGE_BYTES), ranks):
        content = json.loads(row)
        content["device"], content["visible"] = tuple(content["device"]), tuple(content["visible"])
        rows.append(Situation(**content))
    return rows

"""The machine below all else: its CPUs, GPUs and limits, and who gets which. Nothing here imports torch by itself."""

from longshore.machine.affinity import BoundThreads, cpus_of_other_ranks, machine_identity
from longshore.machine.binding import RankBinding, RankDevice, binding_of, binding_wanted, plan_ranks, unbound
from longshore.machine.gpus import all_gpus, numa_node_of, pci_address, pci_folder, visible_gpus
from longshore.machine.limits import cpu_quota, locked_limit_bytes, shared_free_bytes, text_of
from longshore.machine.topology import LogicalCpu, Topology, cpu_list, parse_cpu_list, read_topology, usable_cpus

__all__ = [
    "BoundThreads",
    "LogicalCpu",
    "RankBinding",
    "RankDevice",
    "Topology",
    "all_gpus",
    "binding_of",
    "binding_wanted",
    "cpu_list",
    "cpu_quota",
    "cpus_of_other_ranks",
    "locked_limit_bytes",
    "machine_identity",
    "numa_node_of",
    "parse_cpu_list",
    "pci_address",
    "pci_folder",
    "plan_ranks",
    "read_topology",
    "shared_free_bytes",
    "text_of",
    "unbound",
    "usable_cpus",
    "visible_gpus",
]

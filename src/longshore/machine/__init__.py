"""CPUs, GPUs and limits of this machine, and which of them each rank gets. Importing this does not import torch."""

from longshore.machine.affinity import BoundThreads, cpus_of_other_ranks, machine_identity
from longshore.machine.binding import RankBinding, RankDevice, binding_of, binding_wanted, plan_ranks, unbound
from longshore.machine.hardware import (
    LogicalCpu,
    Topology,
    all_gpus,
    cpu_list,
    cpu_quota,
    locked_limit_bytes,
    numa_node_of,
    parse_cpu_list,
    pci_address,
    pci_folder,
    read_topology,
    shared_free_bytes,
    text_of,
    usable_cpus,
    visible_gpus,
)

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

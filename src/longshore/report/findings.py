"""Find causes of slow training on a machine, and say how to remove them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

from longshore.report.facts import Figures, Machine
from longshore.seam import format_byte_size

_LEAST_BYTES = 1 << 30
"""Least shared memory, and least memory that may be locked, that are not a finding."""
_SLOW_LINK = 10e9
_SLOW_STEP = 0.5


@dataclass(frozen=True)
class Finding:
    """A problem of the machine, and its remedy."""

    what: str
    do: str


def findings_of(machine: Machine, figures: Figures | None = None, load: float | None = None) -> list[Finding]:
    """Return all findings, the worst first.

    Args:
        machine: facts of the machine.
        figures: measured figures, if there are any.
        load: average number of running tasks, before measuring; None: the system's load average now.
    """
    load = os.getloadavg()[0] if load is None else load
    return [*_device(machine, figures), *_cpus(machine, figures, load), *_memory(machine)]


def _device(machine: Machine, figures: Figures | None) -> Iterator[Finding]:
    if machine.software.driver_sees_gpus and not machine.gpus:
        why = "is built for the CPU" if machine.software.cuda is None else "finds none (CUDA_VISIBLE_DEVICES?)"
        yield Finding(f"there are GPUs, and this torch {why}", "install torch for CUDA, or make the devices visible")
    for index, speed in enumerate(figures.to_device_bytes_per_s if figures else ()):
        if speed < _SLOW_LINK:
            yield Finding(
                f"copies to cuda:{index} run at {speed / 1e9:.1f} GB/s: the PCIe slot has few lanes, or is an old one",
                "use a PCIe slot with 16 lanes; hide copies behind larger batches or more accumulation; keep a share "
                "of the state on the device (ratio)",
            )


def _cpus(machine: Machine, figures: Figures | None, load: float) -> Iterator[Finding]:
    cpu, software = machine.cpu, machine.software
    usable = len(cpu.usable)
    if cpu.instruction_set not in ("AVX2", "AVX512"):
        yield Finding(
            f"the host step runs without vector instructions ({cpu.instruction_set})",
            "use a CPU with AVX2 or AVX-512; in a virtual machine, pass the host's CPU through",
        )
    if cpu.quota is not None and cpu.quota < usable:
        threads = max(1, math.floor(cpu.quota))
        yield Finding(
            f"the container shows {usable} CPUs and grants the time of {cpu.quota:g}: with {usable} threads, Linux "
            "would suspend them again and again",
            f"grant more, or set Offload(threads={threads}) (longshore.threads in a configuration file)",
        )
    if load > usable:
        yield Finding(
            f"{load:.1f} tasks were running on {usable} CPUs: measurements and training share the CPUs with them",
            "see what else is running (top)",
        )
    if usable < cpu.logical:
        yield Finding(
            f"this process may use {usable} of {cpu.logical} CPUs",
            "if that is not intended, check taskset, the container's cpuset, and the launcher's --cpu-bind",
        )
    if software.environment.get("OMP_NUM_THREADS") == "1" and usable > 1:
        yield Finding(
            "OMP_NUM_THREADS=1 (torchrun sets it): torch computes on one thread on the CPU; the host step still "
            f"uses {usable}",
            "for models on the CPU, set it to the number of CPUs of a rank",
        )
    if figures is not None and figures.step_bytes_per_s < _SLOW_STEP * figures.memory_copy_bytes_per_s:
        yield Finding(
            f"the host step moves {figures.step_bytes_per_s / 1e9:.1f} GB/s, and a copy in memory "
            f"{figures.memory_copy_bytes_per_s / 1e9:.1f} GB/s",
            "use more threads, if there are CPUs for them; otherwise arithmetic limits the step on this CPU",
        )
    if len(cpu.numa_nodes) > 1:
        yield Finding(
            f"{len(cpu.numa_nodes)} NUMA nodes: memory of another node is slower",
            "run one rank for each GPU, on CPUs of the node that the GPU is attached to (longshore launch, or numactl)",
        )


def _memory(machine: Machine) -> Iterator[Finding]:
    memory = machine.memory
    if memory.swap_used_bytes > memory.total_bytes // 100:
        yield Finding(
            f"{format_byte_size(memory.swap_used_bytes)} are swapped out: a step that reads them takes seconds",
            "free memory, or turn swap off (swapoff)",
        )
    if memory.huge_pages == "never":
        yield Finding(
            "transparent huge pages are off: a step then spends much of its time on address translation",
            "run: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    if memory.limit_bytes is not None and memory.limit_bytes < memory.total_bytes:
        yield Finding(
            f"the container may use {format_byte_size(memory.limit_bytes)} of {format_byte_size(memory.total_bytes)}; "
            "Linux kills it if it uses more",
            "count 12 bytes for each parameter for AdamW's state, and 2 to 4 for gradients, divided by the number of "
            "ranks that share them",
        )
    yield from limit_findings(memory.shared_free_bytes, memory.locked_limit_bytes, bool(machine.gpus))


def limit_findings(shared_free_bytes: int | None, locked_limit_bytes: int | None, gpus: bool) -> Iterator[Finding]:
    """Yield a finding for each limit that is too low for ranks to exchange data with each other or with GPUs.

    ``shared_free_bytes`` and ``locked_limit_bytes`` are as in :class:`~longshore.report.facts.HostMemory`.
    """
    if shared_free_bytes is not None and shared_free_bytes < _LEAST_BYTES:
        yield Finding(
            f"/dev/shm has {format_byte_size(shared_free_bytes)} free: ranks without a device exchange gradients "
            "there, and data loaders their batches",
            "use docker run --shm-size=8g (or --ipc=host)",
        )
    if locked_limit_bytes is not None and locked_limit_bytes < _LEAST_BYTES and gpus:
        yield Finding(
            f"a process may lock {format_byte_size(locked_limit_bytes)} of memory: InfiniBand needs more, and so does "
            "pinned memory with some drivers",
            "use ulimit -l unlimited (docker run --ulimit memlock=-1)",
        )

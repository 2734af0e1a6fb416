"""What of a machine will hurt, and what to do about it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

from longshore.byte_sizes import format_byte_size
from longshore.report.facts import Machine
from longshore.report.figures import Figures

_LEAST_SHARED_BYTES = 1 << 30
_LEAST_LOCKED_BYTES = 1 << 30
_SLOW_LINK = 10e9
_SLOW_STEP = 0.5


@dataclass(frozen=True)
class Finding:
    """One thing that will hurt."""

    what: str
    do: str


def findings_of(machine: Machine, figures: Figures | None = None, load: float | None = None) -> list[Finding]:
    """The worst first.

    Args:
        machine: its facts.
        figures: what was measured, if anything was.
        load: how many tasks ran, on average, before that; None: as the system says now.
    """
    if load is None:
        load = os.getloadavg()[0]
    return [*_device(machine, figures), *_cpus(machine, figures, load), *_memory(machine)]


def _device(machine: Machine, figures: Figures | None) -> Iterator[Finding]:
    if machine.software.driver_sees_gpus and not machine.gpus:
        why = "is built for the CPU" if machine.software.cuda is None else "finds none (CUDA_VISIBLE_DEVICES?)"
        yield Finding(f"there are GPUs, and this torch {why}", "install torch for CUDA, or make the devices visible")
    for index, speed in enumerate(figures.to_device_bytes_per_s if figures else ()):
        if speed < _SLOW_LINK:
            yield Finding(
                f"copies to cuda:{index} run at {speed / 1e9:.1f} GB/s: a slot of few lanes, or an old one",
                "use a slot with 16 lanes; hide copies behind larger batches or more accumulation; keep a share of the "
                "state on the device (ratio)",
            )


def _cpus(machine: Machine, figures: Figures | None, load: float) -> Iterator[Finding]:
    cpu, software = machine.cpu, machine.software
    usable = len(cpu.usable)
    if cpu.instruction_set not in ("AVX2", "AVX512"):
        yield Finding(
            f"the host step runs without vector instructions ({cpu.instruction_set})",
            "use a CPU with AVX2 or AVX-512; in a virtual machine pass the host's CPU through",
        )
    if cpu.quota is not None and cpu.quota < usable:
        threads = max(1, math.floor(cpu.quota))
        yield Finding(
            f"the container grants {cpu.quota:g} CPUs' worth of time, and shows {usable}: as many threads would be "
            "stopped again and again",
            f"grant more, or set Offload(threads={threads}) (longshore.threads in the file)",
        )
    if load > usable:
        yield Finding(
            f"{load:.1f} tasks were running on {usable} CPUs: what is measured, and trains, shares them",
            "look at what else runs (top)",
        )
    if usable < cpu.logical:
        yield Finding(
            f"this process may use {usable} of {cpu.logical} CPUs",
            "if that is not meant: taskset, cpusets of the container, --cpu-bind of the launcher",
        )
    if software.environment.get("OMP_NUM_THREADS") == "1" and usable > 1:
        yield Finding(
            "OMP_NUM_THREADS=1 (torchrun sets it): torch computes on one thread on the CPU; the host step does not "
            f"care, and takes {usable}",
            "for models on the CPU set it to the CPUs of a rank",
        )
    if figures is not None and figures.step_bytes_per_s < _SLOW_STEP * figures.memory_copy_bytes_per_s:
        yield Finding(
            f"the host step moves {figures.step_bytes_per_s / 1e9:.1f} GB/s, where memory gives "
            f"{figures.memory_copy_bytes_per_s / 1e9:.1f}",
            "more threads, if there are CPUs; otherwise it is bound by arithmetic on this CPU",
        )
    if len(cpu.numa_nodes) > 1:
        yield Finding(
            f"{len(cpu.numa_nodes)} NUMA nodes: memory of another node is slower",
            "one rank for each GPU, with the CPUs of the node that it is next to (longshore launch, or numactl)",
        )


def _memory(machine: Machine) -> Iterator[Finding]:
    memory = machine.memory
    if memory.swap_used_bytes > memory.total_bytes // 100:
        yield Finding(
            f"{format_byte_size(memory.swap_used_bytes)} are swapped out: a step that touches them takes seconds",
            "free memory, or switch swap off (swapoff)",
        )
    if memory.huge_pages == "never":
        yield Finding(
            "transparent huge pages are off: much of a step is then address translation",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    if memory.limit_bytes is not None and memory.limit_bytes < memory.total_bytes:
        yield Finding(
            f"the container may use {format_byte_size(memory.limit_bytes)} of {format_byte_size(memory.total_bytes)}, "
            "and is killed beyond",
            "count 12 bytes a parameter for AdamW's state, and 2 to 4 for gradients, divided by the ranks that share "
            "it",
        )
    yield from limit_findings(memory.shared_free_bytes, memory.locked_limit_bytes, bool(machine.gpus))


def limit_findings(shared_free_bytes: int | None, locked_limit_bytes: int | None, gpus: bool) -> Iterator[Finding]:
    """What ranks of one machine need to speak to each other and to their GPUs; None as in :class:`Memory`."""
    if shared_free_bytes is not None and shared_free_bytes < _LEAST_SHARED_BYTES:
        yield Finding(
            f"/dev/shm has {format_byte_size(shared_free_bytes)}: ranks without a device exchange gradients "
            "there, and data loaders their batches",
            "docker run --shm-size=8g (or --ipc=host)",
        )
    if locked_limit_bytes is not None and locked_limit_bytes < _LEAST_LOCKED_BYTES and gpus:
        yield Finding(
            f"a process may lock {format_byte_size(locked_limit_bytes)} of memory: InfiniBand needs more, and some "
            "drivers do for pinned memory",
            "ulimit -l unlimited (docker run --ulimit memlock=-1)",
        )

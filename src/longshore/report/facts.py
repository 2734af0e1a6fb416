"""Facts about this machine, most of them read from Linux's ``/proc``, ``/sys`` and cgroup files, and measured figures.

They contain no host names and no paths, so that a report can be shown to others. A fact that the system does not
provide is None.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from longshore.seam import AdamRule, HostKernels, TileSegment, allocate_zeros, machine, text_of, usable_cpus

_PACKAGES = ("numpy", "safetensors", "transformers", "accelerate", "lightning", "deepspeed", "torchao", "triton")
_ENVIRONMENT = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LONGSHORE_DEBUG")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_UNLIMITED = 1 << 60
"""The least number that means no limit: version 1 of cgroups then writes one near the largest integer."""
_LEAST_NUMEL = 1 << 20
_STEP_ARRAYS = 3
"""Adam's float32 arrays: the master weights and two moments."""


@dataclass(frozen=True)
class Cpu:
    """The CPUs, as this process sees them."""

    name: str
    logical: int
    """Number of logical CPUs of the machine."""
    usable: Sequence[int]
    """Logical CPUs on which this process may run."""
    quota: float | None
    """CPU time that a container grants, in CPUs; None: no limit."""
    numa_nodes: Mapping[int, str]
    """The logical CPUs of each NUMA node, as Linux writes lists: ``0-15,32-47``."""
    caches: Mapping[str, int]
    """Cache sizes of the first CPU in bytes, by name (``L1d``, ``L2``, ``L3``)."""
    instruction_set: str
    """The instruction set that the host kernels use."""
    torch_instruction_set: str


@dataclass(frozen=True)
class HostMemory:
    """Host memory, in bytes."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None
    """The container's limit for all of its processes; None: no limit."""
    locked_limit_bytes: int | None
    """Memory that a process may lock (pin); None: no limit."""
    shared_free_bytes: int | None
    """Free memory in ``/dev/shm``, where ranks of one machine exchange gradients; None: it does not exist."""
    swap_used_bytes: int
    huge_pages: str | None
    """Transparent huge pages: ``always``, ``madvise`` or ``never``."""


@dataclass(frozen=True)
class Gpu:
    """One CUDA device."""

    name: str
    total_bytes: int
    free_bytes: int
    capability: str
    numa_node: int | None
    """The NUMA node that the device is attached to."""
    link: str | None
    """The link to the host as it runs now: ``32.0 GT/s x16``."""
    peers: Sequence[int]
    """Indices of devices whose memory this one accesses directly."""


@dataclass(frozen=True)
class Software:
    """Versions, and settings that change speed."""

    system: str
    python: str
    longshore: str
    torch: str
    cuda: str | None
    driver_sees_gpus: bool
    """Whether a driver shows GPUs, even if torch was not built for them."""
    packages: Mapping[str, str]
    """Versions of other installed packages that matter."""
    environment: Mapping[str, str]
    """Environment variables that change speed."""
    torch_threads: int


@dataclass(frozen=True)
class Machine:
    """All facts about a machine."""

    software: Software
    cpu: Cpu
    memory: HostMemory
    gpus: Sequence[Gpu]


def read_machine(root: Path = Path("/")) -> Machine:
    """Read all facts. This takes milliseconds and, with CUDA, also the time to start CUDA.

    Args:
        root: the folder with ``proc``, ``sys`` and ``dev``.
    """
    return Machine(_software(root), _cpu(root), _memory(root), _gpus(root))


def _software(root: Path) -> Software:
    packages = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return Software(
        f"{platform.system()} {platform.release()} {platform.machine()}",
        platform.python_version(),
        importlib.metadata.version("longshore"),
        str(torch.__version__),
        torch.version.cuda,
        any(root.joinpath("dev").glob("nvidia[0-9]*")),
        packages,
        {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        torch.get_num_threads(),
    )


def _cpu(root: Path) -> Cpu:
    nodes = {}
    for folder in root.glob("sys/devices/system/node/node[0-9]*"):
        nodes[int(folder.name.removeprefix("node"))] = text_of(folder / "cpulist").strip()
    caches = {}
    for folder in sorted(root.glob("sys/devices/system/cpu/cpu0/cache/index*")):
        kind, level, size = (text_of(folder / name).strip() for name in ("type", "level", "size"))
        found = re.fullmatch(r"(\d+)([KMG]?)", size)
        if found and kind != "Instruction":
            caches[f"L{level}{'d' if kind == 'Data' else ''}"] = int(found[1]) * _UNITS.get(found[2], 1)
    name = re.search(r"^model name\s*:\s*(.+)$", text_of(root / "proc/cpuinfo"), re.MULTILINE)
    return Cpu(
        name[1].strip() if name else platform.processor() or platform.machine(),
        os.cpu_count() or 1,
        usable_cpus(),
        machine.cpu_quota(root),
        dict(sorted(nodes.items())),
        caches,
        HostKernels(threads=1).instruction_set.name,
        torch.backends.cpu.get_cpu_capability(),
    )


def _memory(root: Path) -> HostMemory:
    kib = {
        name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+)", text_of(root / "proc/meminfo"), re.MULTILINE)
    }
    total = kib["MemTotal"] * 1024 if "MemTotal" in kib else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = kib["MemAvailable"] * 1024 if "MemAvailable" in kib else machine.available_bytes()
    limits = [text_of(root / "sys/fs/cgroup" / name).strip() for name in ("memory.max", "memory/memory.limit_in_bytes")]
    limit = next((int(text) for text in limits if text.isdigit() and int(text) < _UNLIMITED), None)
    huge = re.search(r"\[(\w+)\]", text_of(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return HostMemory(
        total,
        available,
        limit,
        machine.locked_limit_bytes(),
        machine.shared_free_bytes(root),
        1024 * (kib.get("SwapTotal", 0) - kib.get("SwapFree", 0)),
        huge[1] if huge else None,
    )


def _gpus(root: Path) -> list[Gpu]:
    if not torch.cuda.is_available():
        return []
    count = torch.cuda.device_count()
    found = []
    for index in range(count):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        address = machine.pci_address(about)
        folder = None if address is None else machine.pci_folder(address, root)
        speed, width = (
            "" if folder is None else text_of(folder / f"current_link_{what}").strip() for what in ("speed", "width")
        )
        found.append(
            Gpu(
                about.name,
                total,
                free,
                f"{about.major}.{about.minor}",
                machine.numa_node_of(address, root),
                f"{speed.removesuffix(' PCIe')} x{width}" if speed and width else None,
                [peer for peer in range(count) if peer != index and torch.cuda.can_device_access_peer(index, peer)],
            )
        )
    return found


@dataclass(frozen=True)
class Figures:
    """Medians over some rounds. Bandwidths count both the bytes that are read and those that are written."""

    threads: int
    numel: int
    """Elements that were stepped and copied: far more than caches store."""
    memory_read_bytes_per_s: float
    memory_copy_bytes_per_s: float
    step_numel_per_s: float
    """Elements that AdamW steps in a second, with float32 state, bfloat16 gradients and bfloat16 weights."""
    step_bytes_per_s: float
    to_device_bytes_per_s: Sequence[float]
    """Copies from pinned memory to each CUDA device."""
    from_device_bytes_per_s: Sequence[float]


def measure(
    numel: int = 1 << 26,
    rounds: int = 7,
    note: Callable[[str], None] = lambda line: None,
    threads: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Figures:
    """Measure this machine. By default it takes 1.5 GiB of memory and a few seconds.

    Args:
        numel: elements to step and to copy, at least 2**20.
        rounds: rounds of each figure, after one that is not counted.
        note: a function that is called with the name of the next measurement.
        threads: threads of the host; None: one for each CPU that the process may use.
        clock: a function that returns seconds, for the host's figures; ``time.process_time`` suits one thread on a busy
            machine.

    Raises:
        ValueError: ``numel`` or ``rounds`` is too small.
    """
    if numel < _LEAST_NUMEL or rounds < 1:
        raise ValueError(f"numel must be at least {_LEAST_NUMEL}, rounds at least 1; they are {numel} and {rounds}")
    kernels = HostKernels(threads)
    state = allocate_zeros(_STEP_ARRAYS * numel).view(_STEP_ARRAYS, numel).fill_(1e-3)
    gradient, output = torch.full((numel,), 1e-3, dtype=torch.bfloat16), torch.zeros(numel, dtype=torch.bfloat16)
    note("the host step")
    rule = AdamRule(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=10, decoupled=True)
    segment = TileSegment(0, gradient, output, 0)
    step = _median(lambda: kernels.step_tile(state, state, [segment], [rule]), rounds, clock)
    step_bytes = 2 * state.nbytes + gradient.nbytes + output.nbytes
    note("memory")
    # Memory is measured with the kernels' threads, since torch may have a single one (OMP_NUM_THREADS).
    read = _median(lambda: kernels.block_sums([[state[0]]]), rounds, clock)
    copy = _median(lambda: kernels.accumulate(state[1], state[0], add=False), rounds, clock)
    copies = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        note(f"copies to and from cuda:{index}")
        copies.append(_copies(index, numel, rounds))
    return Figures(
        kernels.threads,
        numel,
        state[0].nbytes / read,
        2 * state[0].nbytes / copy,
        numel / step,
        step_bytes / step,
        [up for up, _ in copies],
        [down for _, down in copies],
    )


def _copies(index: int, numel: int, rounds: int) -> tuple[float, float]:
    """Return the bandwidths to the device and from it, in bytes per second."""
    device = torch.device("cuda", index)
    there = torch.zeros(numel, dtype=torch.float32, device=device)
    here = torch.zeros(numel, dtype=torch.float32, pin_memory=True)

    def timed(target: Tensor, source: Tensor) -> float:
        def run() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)

        return here.nbytes / _median(run, rounds, time.perf_counter)

    return timed(there, here), timed(here, there)


def _median(run: Callable[[], object], rounds: int, clock: Callable[[], float]) -> float:
    def timed() -> float:
        begin = clock()
        run()
        return clock() - begin

    return statistics.median([timed() for _ in range(1 + rounds)][1:])

"""On what hardware and with which software a figure was measured. No host names, no paths."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path

import torch

from longshore.kernels import HostKernels


def describe() -> dict[str, object]:
    """CPU, memory, versions and thread counts, as plain values."""
    return {
        "cpu": cpu_name(),
        "cpus_usable": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "last_level_cache": _last_level_cache(),
        "transparent_huge_pages": _first_line("/sys/kernel/mm/transparent_hugepage/enabled"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_instruction_set": torch.backends.cpu.get_cpu_capability(),
        "torch_threads": torch.get_num_threads(),
        "longshore": importlib.metadata.version("longshore"),
        "longshore_instruction_set": HostKernels(threads=1).instruction_set.name,
    }


def cpu_name() -> str:
    """The CPU's model name, with family and model where the name alone says little."""
    fields = {}
    for line in _read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in fields:
        name += f" (family {fields['cpu family']}, model {fields.get('model', '?')})"
    return name


def short_cpu_name() -> str:
    """The model name as it may stand in a file's name."""
    name = re.sub(r"\(.*?\)|@.*|\bCPU\b|\bProcessor\b", " ", cpu_name())
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unknown"


def load_average() -> list[float]:
    """How busy the machine is: the mean number of running tasks over 1, 5 and 15 minutes."""
    return [round(load, 2) for load in os.getloadavg()]


def _last_level_cache() -> str:
    sizes = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return _read(str(sizes[-1])).strip() if sizes else "unknown"


def _first_line(path: str) -> str:
    return _read(path).partition("\n")[0] or "unknown"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""

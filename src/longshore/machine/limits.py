"""What a system grants to its processes: time on CPUs, locked memory, shared memory."""

from __future__ import annotations

import shutil
from pathlib import Path


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time that a container grants to all of its processes together; None: all of it."""
    limit, _, period = text_of(root / "sys/fs/cgroup/cpu.max").strip().partition(" ")
    if not limit:  # version 1
        limit, period = (text_of(root / f"sys/fs/cgroup/cpu/cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    return int(limit) / int(period) if limit.isdigit() and period.isdigit() and int(period) > 0 else None


def locked_limit_bytes() -> int | None:
    """What this process may lock (pin) of its memory, in bytes; None: any amount."""
    try:
        import resource
    except ImportError:  # no POSIX
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def shared_free_bytes(root: Path = Path("/")) -> int | None:
    """Free in ``dev/shm``, where ranks of one machine exchange gradients; None: there is none."""
    shared = root / "dev/shm"
    return shutil.disk_usage(shared).free if shared.is_dir() else None


def text_of(path: Path) -> str:
    """A file's text; empty where it cannot be read: a system that does not tell is no error."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

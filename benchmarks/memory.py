"""How much memory this process uses: what is resident, and what its allocator has handed out."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from pathlib import Path

import torch
from torch import nn

from benchmarks.floor import NotAvailable

_BETWEEN_LOOKS_S = 0.0005


def load_torch_optimizers() -> None:
    """torch imports its compiler with the first optimizer: some 70 MB of code that are no optimizer's state."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter], fused=True).step()


def resident_bytes() -> int:
    """This process's resident memory, once the allocator has given back what it only keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


_MALLINFO2_FIELDS = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO2_FIELDS]


def allocated_bytes() -> int:
    """Bytes that malloc has handed out and not got back, in all threads; all that torch has on the CPU is among them.

    Raises:
        NotAvailable: the C library is not glibc 2.33 or newer.
    """
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        raise NotAvailable("bytes in use are counted by glibc 2.33 or newer") from None
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return info.hblkhd + info.uordblks


class Peak:
    """The most that was allocated within the block, over what was at its start; looked at twice a millisecond.

    A peak between two looks is missed, so watch several times.
    """

    def __enter__(self) -> Peak:
        gc.collect()
        self._start = self._most = allocated_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_BETWEEN_LOOKS_S):
            self._most = max(self._most, allocated_bytes())

    @property
    def grown_bytes(self) -> int:
        return self._most - self._start


class PeakResident:
    """The most that is resident, of this process and of those that it starts, over what is at the beginning.

    What several processes share counts in each. Linux remembers the peak; where it does not let it be reset,
    only what is seen by :meth:`look` counts.
    """

    def __init__(self) -> None:
        self._seen = 0
        resident_bytes()  # what the allocator only keeps would be used again, and not be seen to grow
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
            self._remembered = "VmHWM"
        except OSError:
            self._remembered = "VmRSS"
        self._start = _of_family(self._remembered)  # there may be some already

    def look(self) -> None:
        """Processes that have ended are only counted if somebody looked while they ran."""
        self._seen = max(self._seen, _of_family(self._remembered))

    @property
    def grown_bytes(self) -> int:
        self.look()
        return self._seen - self._start


def _of_family(name: str) -> int:
    return sum(_status_bytes(Path(f"/proc/{pid}/status"), name) for pid in _family())


def _family() -> set[int]:
    """This process and all that descend from it."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # pid (name) state parent ...; a name may hold spaces and brackets
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def available_bytes() -> int:
    """Memory of this machine that anybody could still have without swapping."""
    return _status_bytes(Path("/proc/meminfo"), "MemAvailable")


def _status_bytes(path: Path, key: str) -> int:
    """0 where the file or the line is missing."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)

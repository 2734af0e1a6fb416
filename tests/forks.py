"""Forked children for tests, and what the kernel says of a process's memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def in_child(call: Callable[[], object]) -> str:
    """Return what a call in a forked child returns, or raises: ``"LongshoreError: ..."``."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(20)
            try:
                said = str(call())
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(writes, said.encode()[:4000])
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        said = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return said if status == 0 else f"the child ended with {status}"


@contextmanager
def sleeping_child() -> Iterator[int]:
    """A forked child that does nothing, as a data loader's worker between two batches; gives its process id."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        signal.pause()
        os._exit(0)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def memory_at(address: int, process: int | str = "self") -> dict[str, int]:
    """Return the figures of smaps, in bytes, of the mapping with this address; empty, if there is none."""
    found: dict[str, int] = {}
    here = False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            low, high = (int(each, 16) for each in first.split("-"))
            here = low <= address < high
        elif here and rest[-1] == "kB":
            found[first[:-1]] = int(rest[0]) << 10
    return found


def huge_pages() -> bool:
    """Return whether the kernel gives huge pages to memory that asks for them."""
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.exists() and "[never]" not in path.read_text()

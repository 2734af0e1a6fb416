"""Threads in place of ranks that share the CPUs of a host and the bandwidth of its memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from longshore.host.memory import available_bytes
from longshore.machine import usable_cpus

_MOST_AT_ONCE = 8
_BYTES_EACH = 2 << 30
"""Of memory, more than what one of them measures in needs."""
_T = TypeVar("_T")


class Together:
    """Runs what each rank does, for all of them at once, until :meth:`close`.

    Args:
        ranks: of the host.
        threads: of all of them together; None: one for each CPU that the process may use.

    Attributes:
        count: that run at once: no more than there are threads, nor memory for, nor than eight. They have all threads.
        turns: that all ranks would take on those threads: how much longer everything takes.
    """

    def __init__(self, ranks: int, threads: int | None = None) -> None:
        threads = threads or len(usable_cpus())
        self.count = max(1, min(ranks, threads, available_bytes() // _BYTES_EACH, _MOST_AT_ONCE))
        self.turns = ranks / self.count
        self._each = threads // self.count if ranks > 1 else torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self.count) if self.count > 1 else None

    def run(self, work: Callable[[int], _T]) -> list[_T]:
        """What ``work`` returns for each of :attr:`count`, which has its part of the threads; one rank has torch's."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self._each)
        try:
            # One alone runs here, where Ctrl-C ends it.
            return [work(0)] if self._pool is None else list(self._pool.map(work, range(self.count)))
        finally:
            torch.set_num_threads(threads)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

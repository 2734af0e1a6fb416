"""Threads in place of ranks that share the CPUs of a host and the bandwidth of its memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

_MOST_AT_ONCE = 8
_T = TypeVar("_T")


class Together:
    """Runs what each rank does, for all of them at once.

    Args:
        ranks: of the host.

    Attributes:
        count: that run at once: no more than torch has threads, and no more than eight, as each needs its memory.
        turns: that ranks would take on the same CPUs, where they are more than torch has threads: how much longer
            everything takes.
    """

    def __init__(self, ranks: int) -> None:
        self._threads = torch.get_num_threads()
        self.count = min(ranks, self._threads, _MOST_AT_ONCE)
        self.turns = max(1.0, ranks / self._threads)
        self._each = max(1, self._threads // ranks)

    def run(self, work: Callable[[int], _T]) -> list[_T]:
        """What ``work`` returns for each, which has its part of torch's threads."""
        torch.set_num_threads(self._each)
        try:
            with ThreadPoolExecutor(self.count) as pool:
                return list(pool.map(work, range(self.count)))
        finally:
            torch.set_num_threads(self._threads)

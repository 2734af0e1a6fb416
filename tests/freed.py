"""What optimizers and engines keep in private memory, with the garbage collector off: as in a program that makes no
garbage for a while."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from longshore.kernels.host import HostKernels
from longshore.transfer import host_memory


@contextmanager
def without_collector() -> Iterator[None]:
    """Turn the garbage collector off for the block, after one run of it: what is in a cycle stays."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def private_bytes() -> int:
    """Return the bytes of all blocks of states, spares, sums and slots that this process has."""
    return sum(map(len, host_memory._blocks))


@contextmanager
def steps_break_half_way() -> Iterator[None]:
    """Let each step of the block fail in its first tile."""

    def fails(*_: Any) -> None:
        raise RuntimeError("no more")

    with mock.patch.multiple(HostKernels, step_tile=fails, step_table=fails):
        yield

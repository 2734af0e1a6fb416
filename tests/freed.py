"""What optimizers and engines keep in private memory, with the garbage collector off: as in a program that makes no
garbage for a while."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from longshore.transfer import private


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def private_bytes() -> int:
    """Return the bytes of all blocks of states, spares, sums and slots that this process has."""
    return sum(map(len, private._blocks))

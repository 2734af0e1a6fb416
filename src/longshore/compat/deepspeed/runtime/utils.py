"""``deepspeed.runtime.utils``."""

from __future__ import annotations

import random

import torch

from longshore.byte_sizes import format_byte_size
from longshore.compat.absent import getter
from longshore.compat.deepspeed.accelerator import get_accelerator
from longshore.compat.deepspeed.utils.logging import log_dist


def set_random_seed(seed: int) -> None:
    """Of Python, NumPy and torch."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log, on rank 0, what is allocated where the model trains; only with ``force``, as in DeepSpeed."""
    if not force:
        return
    device = get_accelerator()
    now, most = map(format_byte_size, (device.memory_allocated(), device.max_memory_allocated()))
    log_dist(f"{message}: {now} allocated, {most} at most", ranks=[0])


__all__ = ["see_memory_usage", "set_random_seed"]
__path__: list[str] = []

__getattr__ = getter(__name__)

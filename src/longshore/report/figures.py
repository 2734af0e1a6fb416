"""Measure the bandwidth of memory, of the host step, and of copies to and from devices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longshore.host.memory import allocate_zeros
from longshore.kernels import HostKernels, TileSegment
from longshore.optim.rules.adam import AdamRule

_LEAST_NUMEL = 1 << 20
_STEP_ARRAYS = 3
"""Adam's float32 arrays: the master weights and two moments."""


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
        note: called with what is measured next.
        threads: threads of the host; None: one for each CPU that the process may use.
        clock: returns seconds, for the host's figures. ``time.process_time`` suits one thread on a busy machine.

    Raises:
        ValueError: ``numel`` or ``rounds`` is too small.
    """
    if numel < _LEAST_NUMEL or rounds < 1:
        raise ValueError(f"numel must be at least {_LEAST_NUMEL}, rounds at least 1; they are {numel} and {rounds}")
    kernels = HostKernels(threads)
    page = allocate_zeros(_STEP_ARRAYS * numel).view(_STEP_ARRAYS, numel).fill_(1e-3)
    gradient, output = torch.full((numel,), 1e-3, dtype=torch.bfloat16), torch.zeros(numel, dtype=torch.bfloat16)
    note("the host step")
    rule = AdamRule(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=10, decoupled=True)
    segment = TileSegment(0, gradient, output, 0)
    step = _median(lambda: kernels.step_tile(page, page, [segment], [rule]), rounds, clock)
    step_bytes = 2 * page.nbytes + gradient.nbytes + output.nbytes
    note("memory")
    # The kernels have threads of their own; torch may have a single one (OMP_NUM_THREADS).
    read = _median(lambda: kernels.block_sums([[page[0]]]), rounds, clock)
    copy = _median(lambda: kernels.accumulate(page[1], page[0], add=False), rounds, clock)
    downs, ups = [], []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        note(f"copies to and from cuda:{index}")
        down, up = _copies(index, numel, rounds)
        downs.append(down)
        ups.append(up)
    return Figures(
        kernels.threads,
        numel,
        page[0].nbytes / read,
        2 * page[0].nbytes / copy,
        numel / step,
        step_bytes / step,
        ups,
        downs,
    )


def _copies(index: int, numel: int, rounds: int) -> tuple[float, float]:
    """Bandwidths from the device and to it, in bytes a second."""
    device = torch.device("cuda", index)
    there = torch.zeros(numel, dtype=torch.float32, device=device)
    here = torch.zeros(numel, dtype=torch.float32, pin_memory=True)

    def timed(target: Tensor, source: Tensor) -> float:
        def run() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)

        return here.nbytes / _median(run, rounds, time.perf_counter)

    return timed(here, there), timed(there, here)


def _median(run: Callable[[], object], rounds: int, clock: Callable[[], float]) -> float:
    seconds = []
    for number in range(-1, rounds):
        begin = clock()
        run()
        if number >= 0:
            seconds.append(clock() - begin)
    return statistics.median(seconds)

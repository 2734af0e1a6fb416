"""What a step takes here beside forward, backward and passes: the norm, and Python's work for each parameter."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longshore.kernels import HostKernels
from longshore.optim import AdamW, Offload
from longshore.plan.probe import Clock

_PARAMETERS, _SMALL = 128, 16
"""So many parameters of so few elements: what they take is Python's."""


class Overheads(NamedTuple):
    """In bytes a second, and in seconds of each parameter."""

    norm_bytes_per_s: float
    """Gradients whose norm all host threads measure."""
    arrival_s: float
    """In backward, for a gradient that comes."""
    bookkeeping_s: float
    """In ``step()``, the norm among it."""


class OverheadsProbe:
    """What is measured, made once and run as often as somebody wants to know.

    Args:
        dtype: of parameters.
        gradient_dtype: of the gradients that the host measures the norm of.
        numel: elements of the gradient that the norm is measured of: more than caches hold.
        threads: of the host; None: one for each CPU that the process may use.
        clock: seconds; on a busy machine with one thread, ``time.process_time``.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        numel: int,
        threads: int | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._kernels = HostKernels(threads)
        self._gradient = torch.full((numel,), 1e-3, dtype=gradient_dtype)
        self._plain, self._stepped = (
            [nn.Parameter(torch.zeros(_SMALL, dtype=dtype)) for _ in range(_PARAMETERS)] for _ in range(2)
        )
        self._optimizer = AdamW(self._stepped, lr=1e-3, release_gradients=True, offload=Offload(threads=threads))
        self._round()  # makes the state

    def measure(self, rounds: int) -> Overheads:
        """Medians of so many rounds."""
        norms, arrivals, steps = zip(*(self._round() for _ in range(rounds)), strict=True)
        return Overheads(
            self._gradient.nbytes / statistics.median(norms),
            max(0.0, statistics.median(arrivals)) / _PARAMETERS,
            statistics.median(steps) / _PARAMETERS,
        )

    def close(self) -> None:
        """End the optimizer's threads; the kernels' go with this object."""
        self._optimizer.close()

    def _round(self) -> tuple[float, float, float]:
        """Seconds of the norm, of arrivals, and of a step."""
        begin = self._clock()
        self._kernels.block_sums([[self._gradient]])
        norm = self._clock() - begin
        plain = self._backward(self._plain)
        arrivals = self._backward(self._stepped) - plain
        for parameter in self._plain:
            parameter.grad = None
        begin = self._clock()
        self._optimizer.clip_grad_norm_(1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm, arrivals, self._clock() - begin

    def _backward(self, parameters: Sequence[Tensor]) -> float:
        loss = torch.stack([each.sum() for each in parameters]).sum()
        begin = self._clock()
        loss.backward()
        return self._clock() - begin

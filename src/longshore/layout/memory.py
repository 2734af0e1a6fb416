"""The bytes that tiles take where they rest, as a store allocates them, counted without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from longshore.layout.tiles import TileRun, padded_bytes

LANDING_SLOTS = 2
"""While the host adds a later gradient from one slot, the next one is copied to the other."""
PIPELINE_DEPTH = 4
"""Number of tiles under way at once: one copied to the host, one stepped, one copied back, one more against jitter."""

_FLOAT_BYTES = torch.float32.itemsize


class Spares(NamedTuple):
    """Buffers and outputs into which tiles are stepped ahead: of how many tiles, the last ones, and their bytes."""

    tiles: int
    num_bytes: int


@dataclass(frozen=True)
class HomeLayout:
    """Tiles that rest in one memory, and how.

    Attributes:
        runs: the tiles, in their order.
        arrays: arrays of each buffer, with the master.
        gradient_dtype: dtype of the gradients that arrive; None: the dtype of their parameters.
        staged: whether gradients are copied here from elsewhere, each tile's into a slot of its own.
        publishes: whether new parameters are copied back.
        own_masters: whether float32 parameters are their own masters.
    """

    runs: tuple[TileRun, ...]
    arrays: int
    gradient_dtype: torch.dtype | None
    staged: bool
    publishes: bool
    own_masters: bool

    @property
    def tiles(self) -> int:
        return sum(run.tiles for run in self.runs)

    def gradient_dtype_of(self, run: TileRun) -> torch.dtype:
        return self.gradient_dtype or run.dtype

    def own_master(self, run: TileRun) -> bool:
        return self.own_masters and run.dtype == torch.float32

    def pass_bytes(self, run: TileRun) -> int:
        """Return the bytes of state that a step of one tile reads and writes."""
        return 2 * run.format.buffer_bytes(self.arrays, run.numel)

    def spares(self, budget: Callable[[int], int]) -> Spares:
        """Return the spares for which there is memory; ``budget`` returns the bytes for them, given the bytes of a
        spare for every tile."""
        sizes = [
            (run.tiles, run.format.buffer_bytes(self.arrays, run.buffer_numel), run.bytes_as(run.dtype))
            for run in self.runs
        ]
        left = budget(sum(count * (state + output) for count, state, output in sizes))
        tiles = total = 0
        for count, state, output in reversed(sizes):
            granted = min(count, max(0, left) // (state + output))
            tiles += granted
            total += granted * (state + padded_bytes(output))
            left -= granted * (state + output)
            if granted < count:
                break
        return Spares(tiles, total)

    def memory(self, arrivals: int, spares: Spares) -> dict[str, int]:
        """Return the bytes by kind when they are most, after a window's last backward, as stores count them.

        Args:
            arrivals: gradients of one parameter in a window.
            spares: memory for stepping ahead.
        """
        state = gradients = sums = landing = 0
        outgoing: list[int] = []
        for run in self.runs:
            gradient_dtype = self.gradient_dtype_of(run)
            state += run.tiles * run.format.buffer_bytes(self.arrays, run.buffer_numel, self.own_master(run))
            if self.staged:
                slot_bytes = padded_bytes(run.bytes_as(gradient_dtype))
                gradients += run.tiles * slot_bytes
                landing = max(landing, slot_bytes)
                if gradient_dtype != run.dtype and self.publishes:  # they do not fit into the gradients' slots
                    outgoing.append(padded_bytes(run.bytes_as(run.dtype)))
            elif arrivals == 1:
                gradients += run.tiles * run.numel * gradient_dtype.itemsize
            if arrivals > 1:
                sums += run.tiles * _FLOAT_BYTES * run.buffer_numel
        return {
            "state": state,
            "gradients": gradients,
            "spares": spares.num_bytes,
            "staging": LANDING_SLOTS * landing + min(PIPELINE_DEPTH, self.tiles) * max(outgoing, default=0),
            "accumulators": sums,
        }

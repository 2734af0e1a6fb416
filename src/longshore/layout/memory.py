"""The bytes that tiles take where they rest, as a store allocates them, counted without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from longshore.layout.tiles import Home, TileRun, padded_bytes

LANDING_SLOTS = 2
"""While the host adds a later gradient from one slot, the next one is copied to the other."""
PIPELINE_DEPTH = 4
"""Number of tiles under way at once: one copied to the host, one stepped, one copied back, one more against jitter."""

_FLOAT_BYTES = torch.float32.itemsize


class Spares(NamedTuple):
    """Buffers and outputs into which tiles are stepped ahead: the numbers of tiles of matrices and of others, the last
    ones of each, and all bytes."""

    of_matrices: int
    others: int
    num_bytes: int


NO_SPARES = Spares(0, 0, 0)


@dataclass(frozen=True)
class HomeLayout:
    """Tiles that rest in one memory, and how.

    Attributes:
        home: the memory.
        runs: the tiles, in their order.
        arrays: arrays of each buffer, with the master.
        matrix_arrays: arrays of each buffer of a matrix.
        gradient_dtype: dtype of the gradients that arrive; None: the dtype of their parameters.
        staged: whether gradients are copied here from elsewhere, each tile's into a slot of its own.
        publishes: whether new parameters are copied back.
        own_masters: whether float32 parameters are their own masters.
    """

    home: Home
    runs: tuple[TileRun, ...]
    arrays: int
    matrix_arrays: int
    gradient_dtype: torch.dtype | None
    staged: bool
    publishes: bool
    own_masters: bool

    @property
    def tiles(self) -> int:
        return sum(run.tiles for run in self.runs)

    def only(self, *, of_matrices: bool) -> HomeLayout:
        """Return the tiles of matrices, or the others."""
        return replace(self, runs=tuple(run for run in self.runs if run.of_matrix is of_matrices))

    def state_bytes(self, run: TileRun, own_master: bool = False) -> int:
        """Return the bytes of one tile's buffer; ``own_master``: without the master."""
        arrays = self.matrix_arrays if run.of_matrix else self.arrays
        return run.format.buffer_bytes(arrays, run.buffer_numel, own_master)

    def gradient_dtype_of(self, run: TileRun) -> torch.dtype:
        return self.gradient_dtype or run.dtype

    def own_master(self, run: TileRun) -> bool:
        return self.own_masters and run.dtype == torch.float32

    def pass_bytes(self, run: TileRun) -> int:
        """Return the bytes of state that a step of one tile reads and writes."""
        return 2 * run.format.buffer_bytes(self.matrix_arrays if run.of_matrix else self.arrays, run.numel)

    def spares(self, budget: Callable[[int, int], int]) -> Spares:
        """Return the spares for which there is memory, of which matrices have the first part.

        ``budget`` returns the bytes for some tiles, given the bytes of a spare for each, and the bytes that others have
        taken."""
        tiles: list[int] = []
        taken = 0
        for of_matrices in (True, False):
            found, num_bytes = self.only(of_matrices=of_matrices)._spares(budget, taken)
            tiles.append(found)
            taken += num_bytes
        return Spares(tiles[0], tiles[1], taken)

    def _spares(self, budget: Callable[[int, int], int], taken: int) -> tuple[int, int]:
        sizes = [(run.tiles, self.state_bytes(run), run.bytes_as(run.dtype)) for run in self.runs]
        left = budget(sum(count * (state + output) for count, state, output in sizes), taken)
        tiles = total = 0
        for count, state, output in reversed(sizes):
            granted = min(count, max(0, left) // (state + output))
            tiles += granted
            total += granted * (state + padded_bytes(output))
            left -= granted * (state + output)
            if granted < count:
                break
        return tiles, total

    def may_get_sums(self, arrivals: int) -> bool:
        """Return whether gradients may be added where they were computed."""
        return arrivals > 1 and self.staged and self.tiles > 0

    def memory(self, arrivals: int, spares: Spares = NO_SPARES, sums_come: bool = False) -> dict[str, int]:
        """Return the bytes by kind when they are most, after a window's last backward, as stores count them.

        Args:
            arrivals: gradients of one parameter in a window.
            spares: memory for stepping ahead.
            sums_come: whether several gradients are added where they were computed, and their sums come here.
        """
        state = gradients = sums = landing = 0
        outgoing: list[int] = []
        for run in self.runs:
            gradient_dtype = self.gradient_dtype_of(run)
            state += run.tiles * self.state_bytes(run, self.own_master(run))
            if self.staged:
                slot_bytes = padded_bytes(run.bytes_as(gradient_dtype))
                gradients += run.tiles * slot_bytes
                landing = max(landing, slot_bytes)
                if gradient_dtype != run.dtype and self.publishes:  # they do not fit into the gradients' slots
                    outgoing.append(padded_bytes(run.bytes_as(run.dtype)))
            elif arrivals == 1:
                gradients += run.tiles * run.numel * gradient_dtype.itemsize
            if arrivals > 1 and not sums_come:
                sums += run.tiles * _FLOAT_BYTES * run.buffer_numel
            elif arrivals > 1 and gradient_dtype != torch.float32:  # else the slots for gradients take them
                sums += run.tiles * padded_bytes(run.bytes_as(torch.float32))
        return {
            "state": state,
            "gradients": gradients,
            "spares": spares.num_bytes,
            "staging": LANDING_SLOTS * landing + min(PIPELINE_DEPTH, self.tiles) * max(outgoing, default=0),
            "accumulators": sums,
        }

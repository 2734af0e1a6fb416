"""Sums of squares that are computed during backward, so that little is left to measure at the verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from longshore.kernels import Kernels, Scale
from longshore.tiles.tile import Segment, Tile
from longshore.transfer import Copy, wait_for_all


class Due(NamedTuple):
    """A parameter whose whole gradient is queued, with the tensors that will have it and the copies to wait for."""

    parameter: int
    versions: list[int]
    gradients: list[Tensor]
    copies: list[Copy]


class _Sums(NamedTuple):
    versions: list[int]
    scale: Scale
    blocks: list[float]


class EarlyNorms:
    """Sums of squares of a window's gradients; ``parts_of`` returns the tiles and segments of a parameter.

    A parameter is measured once its last tile is complete. Its sums are valid until any of its tiles gets a gradient.
    """

    def __init__(self, kernels: Kernels, parts_of: Callable[[int], Sequence[tuple[Tile, Segment]]]) -> None:
        self._kernels = kernels
        self._parts_of = parts_of
        self.wanted = False
        """Whether the last window asked for a norm."""
        self._asked = False
        self._sums: dict[int, _Sums] = {}

    def due(self, tile: Tile) -> list[Due]:
        """Return the parameters of a tile that can be measured after the jobs that are queued now.

        Versions and gradients are read here, while no gradient can arrive: on the worker, a version could already
        count an arrival that is not queued yet.
        """
        found = []
        for parameter in tile.segments:
            parts = self._parts_of(parameter)
            if all(part.complete and segment.arrivals > 0 for part, segment in parts):
                gradients = [part.queued_gradient(segment) for part, segment in parts]
                copies = [segment.handle for _, segment in parts if segment.handle is not None]
                found.append(Due(parameter, [part.version for part, _ in parts], gradients, copies))
        return found

    def measure(self, due: Sequence[Due], scale: Scale) -> None:
        """Measure parameters on the worker, after every addition that was queued when they became due."""
        wait_for_all(copy for one in due for copy in one.copies)
        blocks = self._kernels.block_sums([one.gradients for one in due], scale)
        for one, sums in zip(due, blocks, strict=True):
            self._sums[one.parameter] = _Sums(one.versions, scale, sums)

    def known(self, scale: Scale) -> Mapping[int, Sequence[float]]:
        """Return the sums of blocks that are still valid, by parameter; the worker must be drained."""
        self._asked = True
        return {
            parameter: sums.blocks
            for parameter, sums in self._sums.items()
            if sums.scale == scale and sums.versions == [tile.version for tile, _ in self._parts_of(parameter)]
        }

    def forget(self, parameters: Mapping[int, object]) -> None:
        """Drop the sums of parameters whose gradients are about to be written."""
        for parameter in self._sums.keys() & parameters.keys():  # as long as the shorter of both
            del self._sums[parameter]

    def end_window(self, stepped: bool) -> None:
        """Drop all sums. If a window that was stepped asked for a norm, the next one is expected to ask, too."""
        self._sums.clear()
        if stepped:
            self.wanted, self._asked = self._asked, False

"""Sums of squares that are added up while backward runs, so that the verdict has little left to measure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from longshore.host.tile import Segment, Ticket, Tile
from longshore.kernels import HostKernels, Kernels, Scale


class _Sums(NamedTuple):
    tickets: list[Ticket]
    scale: Scale
    blocks: list[float]


class EarlyNorms:
    """The norms of one store's window, by parameter.

    A parameter is measured by the job of the last of its tiles. What was
    measured holds while nothing more arrived for any of them.

    Args:
        kernels: add the squares.
        parts_of: a parameter's tiles and segments.
    """

    def __init__(self, kernels: HostKernels, parts_of: Callable[[int], Sequence[tuple[Tile, Segment]]]) -> None:
        self._kernels = kernels
        self._parts_of = parts_of
        self.wanted = False
        """Whether the last window asked for a norm."""
        self._asked = False
        self._sums: dict[int, _Sums] = {}

    def measure(self, parameters: Sequence[int], scale: Scale) -> None:
        """On the worker, behind every addition that was queued for these parameters' tiles."""
        found = {}
        for parameter in parameters:
            parts = self._parts_of(parameter)
            tickets = [tile.ticket for tile, _ in parts]
            if all(tile.complete and segment.arrivals > 0 for tile, segment in parts):
                found[parameter] = tickets, [segment.wait() for _, segment in parts]
        blocks = self._kernels.block_sums([pieces for _, pieces in found.values()], scale)
        for (parameter, (tickets, _)), sums in zip(found.items(), blocks, strict=True):
            self._sums[parameter] = _Sums(tickets, scale, sums)

    def known(self, scale: Scale) -> Mapping[int, Sequence[float]]:
        """What was measured and still holds; the worker is drained."""
        self._asked = True
        return {
            parameter: sums.blocks
            for parameter, sums in self._sums.items()
            if sums.scale == scale and sums.tickets == [tile.ticket for tile, _ in self._parts_of(parameter)]
        }

    def forget(self, parameters: Iterable[int]) -> None:
        """Their gradients are about to be written."""
        for parameter in parameters:
            self._sums.pop(parameter, None)

    def end_window(self, stepped: bool) -> None:
        """What was asked for in a window that was stepped will be asked for again."""
        self._sums.clear()
        if stepped:
            self.wanted, self._asked = self._asked, False


def sum_of_squares(
    kernels: Kernels,
    order: Iterable[int],
    known: Mapping[int, Sequence[float]],
    pieces: Mapping[int, Sequence[Tensor]],
    scale: Scale,
) -> float:
    """The kernels' sum over the parameters in ``order``, of which some are ``known`` and the others in ``pieces``."""
    if not known:
        return kernels.sum_of_squares(list(pieces.values()), scale)
    assert isinstance(kernels, HostKernels)
    measured = dict(zip(pieces, kernels.block_sums(list(pieces.values()), scale), strict=True))
    total = 0.0
    for parameter in order:  # the bits are those of adding one block after the other
        for block in known[parameter] if parameter in known else measured[parameter]:
            total += block
    return total

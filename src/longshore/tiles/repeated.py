"""Commit of tiles whose kernels read gradients and write parameters where they are, by addresses alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from longshore.kernels import HostKernels, HostRule, Scale, SegmentTable
from longshore.kernels.base import DTYPE_CODES
from longshore.tiles.tile import Tile, TileEvent
from longshore.tiles.tiles import Tiles


class RepeatedCommit:
    """Commits of the same tiles, each with the same parameters: the tables are computed once.

    Args:
        tiles: tiles of one tier, on the host, that copies nothing.
        parameters: indices of parameters; gradients have the dtypes of their parameters.
    """

    def __init__(self, tiles: Tiles, parameters: Sequence[int]) -> None:
        assert isinstance(tiles.kernels, HostKernels)
        self._tiles = tiles
        self._kernels = tiles.kernels
        places = {parameter: place for place, parameter in enumerate(parameters)}
        self._tables: list[tuple[Tile, SegmentTable, list[int]]] = []
        """Tiles of these parameters, each with the places of its segments' parameters."""
        for tile in tiles:
            segments = [each for each in tile.layout.segments if each.parameter in places]
            code, itemsize = DTYPE_CODES[tile.dtype], tile.dtype.itemsize
            starts = [each.parameter_offset * itemsize for each in segments]
            rows = [
                (each.buffer_offset, each.numel, start, start, code, code, *tile.segments[each.parameter].coding[1:])
                for each, start in zip(segments, starts, strict=True)
            ]
            self._tables.append((tile, SegmentTable(rows), [places[each.parameter] for each in segments]))

    @staticmethod
    def possible(tiles: Tiles) -> bool:
        """Return whether all tiles are stepped on the host, one element at a time, and nothing is copied."""
        alone = len(tiles.tiers) == 1 and not tiles.tier.ranges
        return alone and not tiles.streams.staged and isinstance(tiles.kernels, HostKernels)

    @property
    def undisturbed(self) -> bool:
        """Whether no recorder is told of the tiles' events, and no snapshot has buffers still to read."""
        return not self._tiles.recorders and not self._tiles.tier.snapshots.active

    def commit(
        self,
        addresses: tuple[Sequence[int], Sequence[int], Sequence[int]],
        rules: Sequence[HostRule],
        scale: Scale,
        then: Callable[[], None],
    ) -> None:
        """Step, as :meth:`Tiles.commit` does; ``then`` follows.

        ``addresses`` has for each parameter the address of its gradient (0: it has none and is not stepped), its own
        address, and the number of its rule.
        """
        gradients, outputs, numbers = addresses
        stepped: list[Tile] = []
        with self._tiles.committing(stepped, ()):
            for tile, table, places in self._tables:
                found = [gradients[place] for place in places]
                if not any(found):
                    continue
                assert tile.buffer is not None
                tile.move(TileEvent.ARRIVAL)
                tile.move(TileEvent.COMMIT)
                try:
                    there = found, [outputs[place] for place in places], [numbers[place] for place in places]
                    self._kernels.step_table(tile.buffer, table, there, rules, scale, tile.outputs)
                except BaseException:
                    tile.move(TileEvent.COMMIT_FAILED)
                    raise
                tile.move(TileEvent.COMMIT_DONE)
                stepped.append(tile)
            for tile in stepped:
                tile.move(TileEvent.PUBLISHED)
                tile.window += 1
                tile.version += 1
            then()

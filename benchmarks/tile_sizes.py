"""The host step in tiles of several sizes, by several numbers of threads: what a call costs beside the bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.host_step import CLIP_SCALE, RULE, Arrays
from benchmarks.report import Row, at_most
from benchmarks.timing import Case, Note, interleave, least_ratio, paired_ratio, summary
from longshore.kernels import HostKernels, Scale, TileSegment
from longshore.layout.tiles import default_tile_numel

PART = "tile sizes"


@dataclass(frozen=True)
class Settings:
    """``numel`` elements in tiles of each size, by each number of threads, timed ``rounds`` times."""

    numel: int
    tiles: list[int]
    threads: list[int]
    rounds: int


def _step(arrays: Arrays, threads: int, tile_numel: int) -> Callable[[], None]:
    kernels = HostKernels(threads)
    buffer, slot = arrays.state_buffers[0], arrays.slot
    tables = [
        [TileSegment(at, slot[at : at + tile_numel], slot[at : at + tile_numel], 0)]
        for at in range(0, slot.numel(), tile_numel)
    ]

    def step() -> None:
        for table in tables:
            kernels.step_tile(buffer, buffer, table, [RULE], Scale(CLIP_SCALE))

    return step


def measure(values: Mapping[str, Any], note: Note) -> dict[str, Any]:
    settings = Settings(**values)
    torch.set_num_threads(1)
    arrays = Arrays(settings.numel)
    times: dict[str, Any] = {}
    for threads in settings.threads:
        note(f"{threads} threads")
        cases = {
            str(tile): Case(_step(arrays, threads, tile), prepare=arrays.restore_gradient) for tile in settings.tiles
        }
        seconds = interleave(cases, settings.rounds, note)
        times[str(threads)] = {tile: summary(found) for tile, found in seconds.items()}
    return {"settings": asdict(settings), "torch": torch.__version__, "times": times}


def rows(results: Mapping[str, Any]) -> list[Row]:
    """A row for each number of threads: the default tile of a device beside the best of the others."""
    table = []
    for threads, entry in results["times"].items():
        rounds = {int(tile): found["rounds_s"] for tile, found in entry.items()}
        own = min(rounds, key=lambda tile: abs(tile - default_tile_numel(True, int(threads))))
        others = {tile: paired_ratio(rounds[own], found) for tile, found in rounds.items() if tile != own}
        best = max(others, key=lambda tile: others[tile])
        note = ", ".join(f"{tile >> 20} Mi: {1e3 * entry[str(tile)]['median_s']:.3g} ms" for tile in rounds)
        note += f"; best rounds: {least_ratio(rounds[own], rounds[best]):.3g}"
        what = f"{threads} threads: tiles of {own >> 20} Mi, beside {best >> 20} Mi, the best other one"
        table.append(at_most(PART, what, others[best], "x", 1.05, note))
    return table

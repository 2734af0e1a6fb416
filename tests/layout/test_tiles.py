from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import plan_tiles

from longshore.layout.tiles import SEGMENT_ALIGNMENT, SMALL_NUMEL, Spec, TileRun, align, default_tile_numel, tile_runs

sizes = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 400)), max_size=12)


@given(numels=sizes, tile_numel=st.integers(1, 300), first_index=st.integers(0, 5))
def test_every_element_is_in_one_segment_in_order(numels: list[int], tile_numel: int, first_index: int) -> None:
    # Indices are names, not positions: give them in another order.
    parameters = [(len(numels) - position, numel) for position, numel in enumerate(numels)]
    tiles = plan_tiles(parameters, tile_numel, first_index)
    laid_out = [
        (segment.parameter, segment.parameter_offset + element)
        for tile in tiles
        for segment in tile.segments
        for element in range(segment.numel)
    ]
    assert laid_out == [(index, element) for index, numel in parameters for element in range(numel)]


@given(numels=sizes, tile_numel=st.integers(1, 300), first_index=st.integers(0, 5))
def test_tiles_are_full_but_the_last_and_are_numbered(numels: list[int], tile_numel: int, first_index: int) -> None:
    tiles = plan_tiles(enumerate(numels), tile_numel, first_index)
    assert [tile.index for tile in tiles] == list(range(first_index, first_index + len(tiles)))
    assert [tile.numel for tile in tiles[:-1]] == [tile_numel] * (len(tiles) - 1)
    assert len(tiles) == -(-sum(numels) // tile_numel)
    for tile in tiles:
        assert 1 <= tile.numel <= tile_numel
        assert all(segment.numel >= 1 for segment in tile.segments)
        # A parameter has at most one segment in a tile: segments are keyed by parameter.
        assert len({segment.parameter for segment in tile.segments}) == len(tile.segments)


@given(numels=sizes, tile_numel=st.integers(1, 300))
def test_buffer_offsets_are_aligned_and_disjoint(numels: list[int], tile_numel: int) -> None:
    for tile in plan_tiles(enumerate(numels), tile_numel):
        assert tile.segments[0].buffer_offset == 0
        assert all(segment.buffer_offset % SEGMENT_ALIGNMENT == 0 for segment in tile.segments)
        for left, right in pairwise(tile.segments):
            # Disjoint, in order, and no gap is larger than it must be.
            assert right.buffer_offset == left.buffer_offset + align(left.numel)
        last = tile.segments[-1]
        assert tile.buffer_numel == last.buffer_offset + align(last.numel)


def test_small_segments_come_first_in_their_order() -> None:
    large, small = SMALL_NUMEL, SMALL_NUMEL - 1
    (tile,) = plan_tiles([(0, large), (1, 5), (2, large + 1), (3, small), (4, 0), (5, 1)], 1 << 20)
    assert [segment.parameter for segment in tile.segments] == [1, 3, 5, 0, 2]
    assert [segment.small for segment in tile.segments] == [True] * 3 + [False] * 2
    first, last = plan_tiles([(0, 100), (1, large)], large)
    assert [(each.parameter, each.parameter_offset) for each in first.segments] == [(0, 0), (1, 0)]
    assert [(each.parameter, each.parameter_offset) for each in last.segments] == [(1, large - 100)]
    # The rest of a large parameter may be small.
    assert last.segments[0].small and first.segments[1].numel != large


@pytest.mark.parametrize(
    ("staged", "threads", "expected"),
    [
        (True, 1, 4),
        (True, 16, 4),
        (True, 17, 8),
        (True, 64, 16),
        (True, 192, 32),
        (True, 4096, 32),
        (False, 1, 16),
        (False, 64, 16),
        (False, 65, 32),
    ],
)
def test_the_default_tile_grows_with_the_threads(staged: bool, threads: int, expected: int) -> None:
    assert default_tile_numel(staged, threads) == expected << 20


@given(st.integers(0, 10**12))
def test_align_rounds_up(numel: int) -> None:
    assert align(numel) % SEGMENT_ALIGNMENT == 0
    assert 0 <= align(numel) - numel < SEGMENT_ALIGNMENT


def test_parameters_without_elements_have_no_segment() -> None:
    assert plan_tiles([(0, 0), (1, 0)], 8) == ()
    assert plan_tiles([], 8) == ()
    (tile,) = plan_tiles([(0, 0), (1, 3), (2, 0)], 8)
    assert [segment.parameter for segment in tile.segments] == [1]


def test_tiles_of_one_element() -> None:
    tiles = plan_tiles([(7, 2), (8, 1)], 1)
    cut = [(segment.parameter, segment.parameter_offset, segment.numel) for tile in tiles for segment in tile.segments]
    assert cut == [(7, 0, 1), (7, 1, 1), (8, 0, 1)]
    assert {tile.buffer_numel for tile in tiles} == {SEGMENT_ALIGNMENT}


def test_an_example_by_hand() -> None:
    first, second = plan_tiles([(0, 20), (1, 30)], 40, first_index=3)
    assert [dataclasses.astuple(segment) for segment in first.segments] == [(0, 0, 0, 20), (1, 0, 32, 20)]
    assert [dataclasses.astuple(segment) for segment in second.segments] == [(1, 20, 0, 10)]
    assert (first.index, first.buffer_numel, second.index, second.buffer_numel) == (3, 64, 4, 16)


def test_a_layout_is_frozen() -> None:
    (tile,) = plan_tiles([(0, 3)], 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        tile.index = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        tile.segments[0].numel = 1  # type: ignore[misc]


@pytest.mark.parametrize("tile_numel", [0, -1])
def test_a_tile_has_elements(tile_numel: int) -> None:
    with pytest.raises(ValueError, match=f"at least one element, not {tile_numel}"):
        plan_tiles([(0, 3)], tile_numel)


def test_a_negative_size_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="parameter 5 has -2 elements"):
        plan_tiles([(4, 1), (5, -2)], 8)


def runs_of(parameters: Iterable[tuple[int, int]], tile_numel: int) -> list[TileRun]:
    return list(tile_runs((Spec(index, numel, torch.float32) for index, numel in parameters), tile_numel))


@given(numels=sizes, tile_numel=st.integers(1, 300))
def test_counted_tiles_are_the_tiles(numels: list[int], tile_numel: int) -> None:
    runs = runs_of(enumerate(numels), tile_numel)
    counted = [(run.numel, run.buffer_numel, run.parameters) for run in runs for _ in range(run.tiles)]
    planned = plan_tiles(enumerate(numels), tile_numel)
    assert counted == [
        (tile.numel, tile.buffer_numel, tuple(segment.parameter for segment in tile.segments)) for tile in planned
    ]


def test_counting_takes_as_long_as_there_are_parameters() -> None:
    runs = runs_of([(0, 10**15), (1, 10**15)], 3)
    assert len(runs) == 4 and sum(run.tiles for run in runs) == -(-2 * 10**15 // 3)


@pytest.mark.parametrize(("parameters", "tile_numel"), [([(0, -1)], 8), ([(0, 1)], 0)])
def test_what_cannot_be_counted(parameters: list[tuple[int, int]], tile_numel: int) -> None:
    with pytest.raises(ValueError, match=r"parameter 0 has -1 elements|at least one element, not 0"):
        runs_of(parameters, tile_numel)

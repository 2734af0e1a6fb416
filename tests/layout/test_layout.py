from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longshore.layout.formats import Coding, StateFormat
from longshore.layout.layout import Division, Grid, Layout, ParameterLayout, RankGrid, Shards, division_of
from longshore.layout.tiles import SEGMENT_ALIGNMENT, DimRange, MatrixLayout, Range, Spec

BF16, FP32 = torch.bfloat16, torch.float32
SPECS = st.lists(st.tuples(st.integers(0, 300), st.sampled_from([FP32, BF16])), max_size=12).map(
    lambda entries: [Spec(index, numel, dtype) for index, (numel, dtype) in enumerate(entries)]
)


@given(SPECS, st.integers(1, 500), st.integers(1, 5))
def test_every_element_has_one_owner(specs: list[Spec], bucket_numel: int, world: int) -> None:
    owners: dict[tuple[int, int], int] = {}
    for bucket in Shards(world, 0).buckets(specs, bucket_numel):
        assert len(bucket.ranges) == world
        assert bucket.shard_numel % SEGMENT_ALIGNMENT == 0
        for rank, ranges in enumerate(bucket.ranges):
            end = 0
            for owned in ranges:
                assert owned.shard_offset >= end
                end = owned.shard_offset + owned.numel
                place = [member.parameter for member in bucket.members].index(owned.parameter)
                offset = sum(member.numel for member in bucket.members[:place])
                # The place in the shard is the place in the bucket.
                assert offset + owned.offset == rank * bucket.shard_numel + owned.shard_offset
                for element in range(owned.offset, owned.offset + owned.numel):
                    assert owners.setdefault((owned.parameter, element), rank) == rank
            assert end <= bucket.shard_numel
    assert len(owners) == sum(spec.numel for spec in specs)


@given(SPECS, st.integers(1, 500), st.integers(1, 5), st.integers(0, 2), st.integers(0, 12))
def test_keys_are_of_one_range_each_and_the_same_on_every_rank(
    specs: list[Spec], bucket_numel: int, world: int, stage: int, first: int
) -> None:
    def laid_out(rank: int) -> Layout:
        return Layout(division_of(stage, world, rank), bucket_numel).extended(specs[:first]).extended(specs[first:])

    layouts = [laid_out(rank) for rank in range(world)]
    assert len({layout.checksum for layout in layouts}) == 1
    assert [bucket.index for bucket in layouts[0].buckets] == list(range(len(layouts[0].buckets)))
    everywhere = [[own for bucket in layout.buckets for own in bucket.ranges] for layout in layouts]
    assert all(each == everywhere[0] for each in everywhere)
    keys = [owned.key for own in everywhere[0] for owned in own]
    assert len(set(keys)) == len(keys)
    for layout in layouts:
        stepped = [owned.key for bucket in layout.buckets for owned in bucket.owned]
        assert [spec.key for spec in layout.parts()] == stepped[::-1]
        assert set(layout.ranges) == set(stepped)


def elements_of(ranges: Iterable[Range]) -> list[tuple[int, int]]:
    return [(each.parameter, element) for each in ranges for element in range(each.offset, each.offset + each.numel)]


@given(SPECS, st.integers(1, 500), st.integers(1, 5), st.integers(0, 2))
def test_what_all_ranks_step_is_saved_once(specs: list[Spec], bucket_numel: int, world: int, stage: int) -> None:
    layouts = [Layout(division_of(stage, world, rank), bucket_numel).extended(specs) for rank in range(world)]
    saved: list[tuple[int, int]] = []
    for rank, layout in enumerate(layouts):
        for spec in specs:
            owned = layout.owned(spec.key)
            elements = elements_of(owned)
            assert len(elements) == layout.stepped_by_rank(spec.key)[rank] if spec.numel else not elements
            assert stage > 0 or len(elements) == spec.numel, "at stage 0 every rank steps everything"
            assert all(each.counts for each in owned)
            saved += elements_of(each for each in owned if each.saves)
    assert sorted(saved) == sorted((spec.key, element) for spec in specs for element in range(spec.numel))


@given(SPECS, st.integers(1, 500))
def test_buckets_are_of_one_dtype_and_within_their_size(specs: list[Spec], bucket_numel: int) -> None:
    for bucket in Shards(2, 0).buckets(specs, bucket_numel):
        assert {specs[member.parameter].dtype for member in bucket.members} == {bucket.dtype}
        assert bucket.numel <= bucket_numel or len(bucket.members) == 1


def test_the_last_registered_come_first() -> None:
    specs = [Spec(0, 10, FP32), Spec(1, 10, BF16), Spec(2, 10, FP32), Spec(3, 5, BF16), Spec(4, 10, FP32)]
    buckets = Shards(2, 0).buckets(specs, 20)
    assert [[member.parameter for member in bucket.members] for bucket in buckets] == [[4, 2], [3, 1], [0]]


def test_parameters_that_are_divided_at_blocks_have_buckets_of_their_own() -> None:
    encoded = Coding(StateFormat.EIGHT_BIT)
    first, second = Shards(2, 0).buckets([Spec(0, 192, BF16, encoded), Spec(1, 10, BF16)], 1000)
    assert [member.parameter for member in first.members] == [1]
    assert [own[0].numel for own in second.ranges] == [128, 64]


@pytest.mark.parametrize(
    "call",
    [
        lambda: Shards(1, 0).buckets([], 0),
        lambda: Shards(0, 0),
        lambda: Shards(1, 0).buckets([Spec(0, -1, FP32)], 1),
    ],
)
def test_nonsense_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"not|-1"):
        call()


# -- stage 3 ------------------------------------------------------------------

GRIDS = {
    "shards": [[[0], [1], [2]]],
    "replicas": [[[0], [1]], [[2], [3]]],
    "tensor parallelism": [[[0, 1], [2, 3]]],
    "all": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
}
SHAPES = [(5, 4), (2, 3), (7,), (1, 6)]
DIMS = [0, 1, None, None]


def grid_divisions(name: str) -> list[Division]:
    grid = RankGrid(GRIDS[name])
    layouts = [
        ParameterLayout(shape, dim if grid.tp_size > 1 else None, grid) for shape, dim in zip(SHAPES, DIMS, strict=True)
    ]
    return [Grid(grid, rank, layouts.__getitem__, lambda index: index // 2) for rank in range(len(grid.positions))]


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_has_every_element_once(name: str) -> None:
    specs = [Spec(index, torch.Size(shape).numel(), FP32) for index, shape in enumerate(SHAPES)]
    wholes = [torch.arange(spec.numel, dtype=torch.float32) for spec in specs]
    layouts = [Layout(division, 1000).extended(specs) for division in grid_divisions(name)]
    saved = [torch.zeros(spec.numel) for spec in specs]
    counted = [torch.zeros(spec.numel) for spec in specs]
    for index, whole in enumerate(wholes):
        parts = [_of_rank(layout, index, whole) for layout in layouts]
        assert [part.numel() for part in parts] == layouts[0].stepped_by_rank(index)
        assert torch.equal(layouts[-1].division.joined(index, parts), whole)
        for layout, part in zip(layouts, parts, strict=True):
            for owned in layout.owned(index):
                assert torch.equal(layout.division.held(index, whole)[owned.held], part)
                saved[index][part.long()] += owned.saves
                counted[index][part.long()] += owned.counts
    assert all(bool((each == 1).all()) for each in (*saved, *counted))
    # Gathered together, reduced together.
    assert [sorted(bucket.parameters) for bucket in layouts[0].buckets] == [[2, 3], [0, 1]]
    for layout in layouts:
        for bucket in layout.buckets:
            ends = [own[-1].shard_offset + own[-1].numel for own in bucket.ranges if own]
            assert max(ends) <= bucket.shard_numel < max(ends) + SEGMENT_ALIGNMENT


def _of_rank(layout: Layout, parameter: int, whole: torch.Tensor) -> torch.Tensor:
    part = layout.division.part(parameter, whole)
    found = [part[owned.elements] for owned in layout.owned(parameter)]
    return torch.cat([torch.empty(0), *found])


# -- parts --------------------------------------------------------------------


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 4), st.integers(0, 2))
def test_what_a_rank_steps_keeps_its_places_in_the_whole(numels: Sequence[int], world: int, stage: int) -> None:
    specs = []
    for index, numel in enumerate(numels):
        matrix = MatrixLayout(numel, 1, (DimRange(0, 0, numel),)).whole(index)
        specs.append(Spec(index, numel, FP32, Coding(StateFormat.BF16, stream=index), matrix))
    for rank in range(world):
        layout = Layout(division_of(stage, world, rank), 1000).extended(specs)
        for part in layout.parts():
            owned = layout.ranges[part.key]
            assert (part.numel, part.coding.stream, part.coding.place) == (owned.numel, owned.parameter, owned.offset)
            assert part.matrix is not None and part.offset == 0
            assert (part.matrix.parameter, part.matrix.offset) == (owned.parameter, owned.offset)

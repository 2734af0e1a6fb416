from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.layout.divisions import plan_buckets
from longshore.layout.tiles import SEGMENT_ALIGNMENT

PARAMETERS = st.lists(st.tuples(st.integers(0, 300), st.sampled_from(["fp32", "bf16"])), max_size=12).map(
    lambda entries: [(index, numel, kind) for index, (numel, kind) in enumerate(entries)]
)


@given(PARAMETERS, st.integers(1, 500), st.integers(1, 5))
def test_every_element_has_one_owner(parameters: list[tuple[int, int, str]], bucket_numel: int, world: int) -> None:
    buckets = plan_buckets(parameters, bucket_numel, world)
    owners: dict[tuple[int, int], int] = {}
    for bucket in buckets:
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
                assert offset + owned.parameter_offset == rank * bucket.shard_numel + owned.shard_offset
                for element in range(owned.parameter_offset, owned.parameter_offset + owned.numel):
                    assert owners.setdefault((owned.parameter, element), rank) == rank
            assert end <= bucket.shard_numel
    assert len(owners) == sum(numel for _, numel, _ in parameters)


@given(PARAMETERS, st.integers(1, 500), st.integers(1, 5))
def test_pieces_and_buckets_are_numbered_without_gaps(
    parameters: list[tuple[int, int, str]], bucket_numel: int, world: int
) -> None:
    buckets = plan_buckets(parameters, bucket_numel, world, first_bucket=3, first_range=7)
    assert [bucket.index for bucket in buckets] == list(range(3, 3 + len(buckets)))
    numbers = [owned.index for bucket in buckets for ranges in bucket.ranges for owned in ranges]
    assert numbers == list(range(7, 7 + len(numbers)))


@given(PARAMETERS, st.integers(1, 500))
def test_buckets_are_of_one_kind_and_within_their_size(
    parameters: list[tuple[int, int, str]], bucket_numel: int
) -> None:
    kinds = {index: kind for index, _, kind in parameters}
    for bucket in plan_buckets(parameters, bucket_numel, 2):
        assert len({kinds[member.parameter] for member in bucket.members}) == 1
        total = sum(member.numel for member in bucket.members)
        assert total <= bucket_numel or len(bucket.members) == 1


def test_the_last_registered_come_first() -> None:
    buckets = plan_buckets([(0, 10, "a"), (1, 10, "b"), (2, 10, "a"), (3, 5, "b"), (4, 10, "a")], 20, 2)
    assert [[member.parameter for member in bucket.members] for bucket in buckets] == [[4, 2], [3, 1], [0]]


@pytest.mark.parametrize(
    "call", [lambda: plan_buckets([], 0, 1), lambda: plan_buckets([], 1, 0), lambda: plan_buckets([(0, -1, "a")], 1, 1)]
)
def test_nonsense_is_refused(call) -> None:
    with pytest.raises(ValueError, match=r"not|-1"):
        call()

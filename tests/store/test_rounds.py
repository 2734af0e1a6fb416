from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longshore.layout.layout import Bucket, Shards
from longshore.layout.tiles import Spec
from longshore.store.rounds import PendingGradients, Round


class Recorder:
    """What a round launches, and when."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, set[int]]] = []

    def __call__(self, current: Round, bucket: Bucket, gradients: dict[int, torch.Tensor]) -> None:
        self.launched.append((bucket.index, set(gradients)))


def make(count: int, order: list[int] | None = None, early: bool = True) -> tuple[Round, Recorder, list[Bucket]]:
    """``count`` buckets of two parameters each: parameters 2k and 2k + 1 are in the bucket count - 1 - k."""
    specs = [Spec(index, 8, torch.float32) for index in range(2 * count)]
    buckets = list(Shards(2, 0).buckets(specs, 16))
    recorder = Recorder()
    chosen = [buckets[index] for index in order] if order else buckets
    return Round(1, chosen, recorder, early), recorder, buckets


def gradient() -> torch.Tensor:
    return torch.ones(8)


def test_what_is_lent_stays_as_it_was() -> None:
    kept = PendingGradients(torch.float32)
    for parameter in (0, 0, 1):
        kept.add(parameter, gradient())
    lent = kept.lend([0, 1, 2])
    assert set(lent) == {0, 1} and len(kept.gradients) == 2 and not kept.outdated
    kept.add(3, gradient())
    assert not kept.outdated
    kept.add(0, gradient())
    assert kept.outdated
    assert torch.equal(lent[0], 2 * gradient()), "it may be on its way"
    assert torch.equal(kept.take([0])[0], 3 * gradient())


@pytest.mark.parametrize("change", ["add", "forget", "nothing to forget"])
def test_any_change_of_what_was_lent_is_seen(change: str) -> None:
    kept = PendingGradients(torch.float32)
    kept.add(0, gradient())
    kept.lend([0, 1])
    if change == "add":
        kept.add(1, gradient())  # there was none when it was lent
    else:
        kept.forget(0 if change == "forget" else 1)
    assert kept.outdated == (change != "nothing to forget")


def test_a_bucket_is_launched_when_it_is_full() -> None:
    current, recorder, _ = make(2)
    assert current.take(0, 3, gradient())
    assert recorder.launched == []
    assert current.take(0, 2, gradient())
    assert recorder.launched == [(0, {2, 3})]
    current.close()
    assert recorder.launched == [(0, {2, 3}), (1, set())]


def test_full_buckets_wait_for_those_before_them() -> None:
    current, recorder, _ = make(3)
    for parameter in (0, 1, 2, 3):
        current.take(2 - parameter // 2, parameter, gradient())
    assert recorder.launched == []
    current.take(0, 5, gradient())
    current.take(0, 4, gradient())
    assert [index for index, _ in recorder.launched] == [0, 1, 2]
    assert current.completed == [2, 1, 0]


def test_an_idle_head_at_the_end_of_the_order_holds_nobody_up() -> None:
    current, recorder, _ = make(3, order=[1, 2, 0])
    for parameter in (0, 1, 2, 3):
        current.take(2 - parameter // 2, parameter, gradient())
    assert [index for index, _ in recorder.launched] == [1, 2]


def test_without_early_everything_waits_for_the_end() -> None:
    current, recorder, _ = make(1, early=False)
    current.take(0, 0, gradient())
    current.take(0, 1, gradient())
    assert recorder.launched == []
    current.close()
    assert recorder.launched == [(0, {0, 1})]


def test_there_is_no_place_for_what_comes_twice_or_late() -> None:
    current, _, _ = make(1)
    assert current.take(0, 0, gradient())
    assert not current.take(0, 0, gradient())
    assert current.take(0, 1, gradient())
    assert not current.take(0, 1, gradient())


@given(st.permutations(range(8)), st.permutations(range(4)), st.integers(0, 8), st.booleans())
def test_each_bucket_is_launched_once_in_order(arrivals: list[int], order: list[int], count: int, early: bool) -> None:
    current, recorder, _ = make(4, order=order, early=early)
    for parameter in arrivals[:count]:
        assert current.take(3 - parameter // 2, parameter, gradient())
    current.close()
    assert [index for index, _ in recorder.launched] == order
    assert set().union(*(parameters for _, parameters in recorder.launched)) == set(arrivals[:count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_contribution_is_kept_and_later_ones_are_added(dtype: torch.dtype) -> None:
    pending = PendingGradients(dtype)
    first = torch.tensor([1.0, 1.0], dtype=torch.bfloat16)
    pending.add(3, first)
    assert not pending.summed
    assert pending.take([3, 4])[3] is first
    assert len(pending.gradients) == 0
    pending.add(3, first)
    pending.add(3, torch.tensor([2**-9, 2.0], dtype=torch.bfloat16))
    pending.add(3, torch.tensor([2**-9, 3.0], dtype=torch.bfloat16))
    assert pending.summed
    assert torch.equal(first, torch.tensor([1.0, 1.0], dtype=torch.bfloat16))  # it may be the user's
    total = pending.take([3])[3]
    assert total.dtype == dtype
    # bfloat16 has no room for 2**-9 beside 1.
    assert torch.equal(total.float(), torch.tensor([1.0 + 2**-8 if dtype == torch.float32 else 1.0, 6.0]))


def test_what_is_forgotten_is_gone() -> None:
    pending = PendingGradients(torch.float32)
    pending.add(1, torch.ones(2))
    pending.add(1, torch.ones(2))
    pending.forget(1)
    pending.forget(9)
    assert 1 not in pending.gradients
    assert not pending.summed


@pytest.mark.parametrize("lent_after", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sum_has_the_same_bits_whenever_it_was_lent(lent_after: int, dtype: torch.dtype) -> None:
    gradients = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    kept, lent = PendingGradients(dtype), PendingGradients(dtype)
    for number, gradient in enumerate(gradients):
        if number == lent_after:
            before = lent.lend([0])[0]
            read = before.clone()
        kept.add(0, gradient)
        lent.add(0, gradient)
    expected = gradients[0].to(dtype)
    for gradient in gradients[1:]:
        expected = expected + gradient.to(dtype)
    assert torch.equal(kept.take([0])[0], expected)
    assert lent.outdated and torch.equal(lent.take([0])[0], expected)
    assert torch.equal(before, read)  # somebody may be reading it still

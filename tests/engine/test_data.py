from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from longshore.engine.data import make_loader
from longshore.engine.ranks import Ranks


def rank_of(rank: int, world_size: int) -> Ranks:
    return Ranks(rank, world_size, rank, torch.device("cpu"), None, False)


ALONE = rank_of(0, 1)


def batches(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(5))


def test_each_rank_has_its_part_of_one_order() -> None:
    alone = [sample for batch in batches(make_loader(range(12), 2, ALONE)) for sample in batch]
    assert sorted(alone) == list(range(12)) and alone != list(range(12))
    for rank in range(3):
        loader = make_loader(range(12), 2, rank_of(rank, 3))
        assert len(loader) == 2 and loader.batch_size == 2
        assert [sample for batch in batches(loader) for sample in batch] == alone[rank::3]


def test_what_does_not_come_out_even_is_repeated_and_the_last_batch_is_kept_or_not() -> None:
    loaders = [make_loader(range(10), 2, rank_of(rank, 3)) for rank in range(3)]
    seen = [batches(loader) for loader in loaders]
    assert [[len(batch) for batch in each] for each in seen] == [[2, 2]] * 3
    samples = [sample for each in seen for batch in each for sample in batch]
    assert set(samples) == set(range(10)) and len(samples) == 12
    short = make_loader(range(10), 3, rank_of(1, 3))
    assert [len(batch) for batch in batches(short)] == [3, 1] and len(short) == 2
    dropped = make_loader(range(10), 3, rank_of(1, 3), drop_last=True)
    assert batches(dropped) == batches(short)[:1] and len(dropped) == 1


def test_the_order_is_torchs_of_that_seed_and_epoch() -> None:
    loader = make_loader(range(10), 10, ALONE, seed=5)
    for epoch in (0, 3):
        loader.set_epoch(epoch)
        assert loader.epoch == epoch
        sampler: Any = DistributedSampler(list(range(10)), 1, 0, seed=5)
        sampler.set_epoch(epoch)
        assert batches(loader) == batches(loader) == [list(sampler)]
    assert batches(loader) != batches(make_loader(range(10), 10, ALONE, seed=6))


def test_samples_are_collated() -> None:
    data = TensorDataset(torch.arange(4.0), torch.arange(4))
    ((x, y),) = make_loader(data, 4, ALONE)
    assert x.dtype == torch.float32 and torch.equal(x.long(), y)
    loader = make_loader(data, 4, ALONE, collate_fn=lambda samples: len(samples))
    assert list(loader) == [4] and loader.dataset is data


def test_workers_read_the_same() -> None:
    assert batches(make_loader(range(6), 2, ALONE, num_workers=1)) == batches(make_loader(range(6), 2, ALONE))


def test_a_stream_for_one_rank() -> None:
    loader = make_loader(Stream(), 2, ALONE)
    assert batches(loader) == [[0, 1], [2, 3], [4]]
    assert loader.epoch == 0
    with pytest.raises(TypeError):
        len(loader)
    with pytest.raises(TypeError, match="its own order"):
        loader.set_epoch(1)
    with pytest.raises(TypeError, match="IterableDataset cannot be split over 2 ranks"):
        make_loader(Stream(), 2, rank_of(0, 2))


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (DataLoader([1, 2]), TypeError, "this is a loader already: give its dataset"),  # type: ignore[arg-type]
        (make_loader([1, 2], 1, ALONE), TypeError, "this is a loader already"),
        (iter([1, 2]), TypeError, "must have __getitem__ and __len__, such as a torch Dataset or a list"),
        (NoLength(), TypeError, "must have __len__, and NoLength does not"),
        ({"a": 1}, TypeError, "must have samples by number.*dict does not"),
        ("train.bin", TypeError, "str does not"),
        ([], ValueError, "is empty"),
    ],
)
def test_what_is_no_dataset_is_refused(data: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make_loader(data, 1, ALONE)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"micro_batch_size": 0}, ValueError, "the micro batch size must be at least 1, and is 0"),
        ({"micro_batch_size": 2.0}, TypeError, "the micro batch size is an integer"),
        ({"micro_batch_size": True}, TypeError, "the micro batch size is an integer"),
        ({"num_workers": -1}, ValueError, "num_workers must be at least 0"),
        ({"seed": "0"}, TypeError, "seed is an integer"),
        ({"drop_last": 1}, TypeError, "drop_last is true or false"),
        ({"collate_fn": "pad"}, TypeError, "collate_fn is a function"),
        ({"micro_batch_size": 5, "drop_last": True}, ValueError, "leaves no batch: each of 1 ranks has 4 samples"),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make_loader(**{"training_data": range(4), "micro_batch_size": 1, "ranks": ALONE, **options})


@pytest.mark.parametrize("epoch", [-1, 1.5, True, None])
def test_an_epoch_is_a_count(epoch: Any) -> None:
    with pytest.raises(ValueError, match="an epoch is an integer that is not negative"):
        make_loader(range(4), 1, ALONE).set_epoch(epoch)

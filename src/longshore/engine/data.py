"""The training loader that ``initialize`` returns: torch's ``DataLoader`` on this rank's samples."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from longshore.engine.ranks import Ranks
from longshore.engine.wording import is_integer, shown

Batch = TypeVar("Batch")


class _Order(DistributedSampler[Any]):
    """The samples of one rank in an epoch; the next ``iter()`` leaves out the first ``skipped`` ones.

    Samples that a script adds to the data, or takes out, count from the next ``iter()`` on. torch's sampler goes on
    with the number that it found at first.
    """

    skipped = 0

    def __len__(self) -> int:
        samples: Any = self.dataset
        self.num_samples = -(-len(samples) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        return self.num_samples

    def __iter__(self) -> Iterator[Any]:
        len(self)
        skipped, self.skipped = self.skipped, 0
        return itertools.islice(super().__iter__(), skipped, None)


class TrainingLoader(Generic[Batch]):
    """Batches of this rank's samples, in an order that depends on the epoch and the seed alone.

    Each ``iter()`` starts at the beginning of the epoch, except the first one after :meth:`load_state_dict`. As in
    DeepSpeed and torch, the epoch changes only by :meth:`set_epoch`.
    """

    def __init__(self, loader: DataLoader[Any], order: _Order | None) -> None:
        self.loader = loader
        self._order = order
        self._batches = 0
        """Batches of the current epoch that were returned."""
        self._resumed: int | None = None
        """Batches that the next ``iter()`` leaves out; None: it begins an epoch."""

    def __iter__(self) -> Iterator[Batch]:
        self._batches, self._resumed = self._resumed or 0, None
        random_state = torch.get_rng_state()
        if self._order is not None:
            self._order.skipped = self._batches * self.batch_size
        batches = iter(self.loader)
        if self._batches > 0:
            # torch draws a seed for the workers of an epoch, which the run that is resumed here has drawn already.
            torch.set_rng_state(random_state)
        return self._counted(batches)

    def _counted(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self._batches += 1
            yield batch
        self._batches = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the current epoch, in samples of all ranks, so that any number of ranks can resume."""
        if self._order is None:
            return {}  # only the stream itself may know its position
        batches = self._batches if self._resumed is None else self._resumed
        return {"epoch": self.epoch, "samples": batches * self.batch_size * self._order.num_replicas}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next ``iter()`` continue after the batches that :meth:`state_dict` counted. If no batch begins there,
        since batches have another size now, ``iter()`` starts with the batch before, with a warning.

        Raises:
            ValueError: ``state_dict`` is not the state of a loader.
        """
        if not state_dict:
            return
        epoch, samples = (state_dict.get(name, -1) for name in ("epoch", "samples"))
        if self._order is None or not is_integer(epoch) or not is_integer(samples) or epoch < 0 or samples < 0:
            raise ValueError(f"{shown(dict(state_dict))} is no position in these data")
        batches, rest = divmod(samples, self.batch_size * self._order.num_replicas)
        if rest:
            warnings.warn(
                f"the run was {samples} samples into its epoch, which is in the middle of a batch of {self.batch_size} "
                f"on each of {self._order.num_replicas} ranks: the last {rest} come again",
                stacklevel=2,
            )
        self.set_epoch(epoch)
        self._resumed = batches

    def __len__(self) -> int:
        """Return the number of batches per epoch. Raises TypeError for a stream of unknown length."""
        return len(self.loader)

    @property
    def batch_size(self) -> int:
        """Samples per batch on this rank; the last batch may have fewer unless it is dropped."""
        size = self.loader.batch_size
        assert size is not None
        return size

    @property
    def dataset(self) -> Any:
        return self.loader.dataset

    @property
    def epoch(self) -> int:
        return 0 if self._order is None else self._order.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, and so the order from the next ``iter()`` on; all ranks have to pass the same number.

        Raises:
            ValueError: ``epoch`` is negative or not an integer.
            TypeError: the dataset is a stream, which has its own order.
        """
        if not is_integer(epoch) or epoch < 0:
            raise ValueError(f"an epoch is an integer that is not negative, not {shown(epoch)}")
        if self._order is None:
            raise TypeError("an IterableDataset has its own order: tell the dataset about the epoch")
        if epoch != self.epoch:
            self._resumed = None  # which was a position in another epoch
        self._order.set_epoch(epoch)


def make_loader(
    training_data: Any,
    micro_batch_size: int,
    ranks: Ranks,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    drop_last: bool = False,
    num_workers: int = 0,
    seed: int | None = 0,
) -> TrainingLoader[Any]:
    """Make the loader of ``training_data`` for one rank.

    The order does not depend on the number of ranks: rank r of n gets samples r, r + n, ... of it. If they cannot be
    divided evenly, the first ones are repeated, so that all ranks have equally many batches.

    Args:
        training_data: a dataset with ``__getitem__`` and ``__len__``; or, for one rank, an ``IterableDataset``.
        micro_batch_size: samples per batch and rank. Batches for a CUDA device are pinned.
        collate_fn: a function from a list of samples to a batch; by default torch's.
        drop_last: leave out a last batch with fewer samples (the configuration's ``dataloader_drop_last``).
        num_workers: processes that read ahead.
        seed: seed of the shuffled order; None: samples are not shuffled.

    Raises:
        TypeError: ``training_data`` is not a dataset, or is a stream and there are several ranks; or an argument has
            another type.
        ValueError: a size is too small, or there are no samples, or no full batch and smaller ones are dropped.
    """
    numbers = {"the micro batch size": (micro_batch_size, 1), "num_workers": (num_workers, 0), "seed": (seed, 0)}
    for name, (value, least) in numbers.items():
        if value is None and name == "seed":
            continue
        if not is_integer(value):
            raise TypeError(f"{name} is an integer, not {shown(value)}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, and is {value}")
    if not isinstance(drop_last, bool):
        raise TypeError(f"drop_last is true or false, not {shown(drop_last)}")
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(f"collate_fn is a function from a list of samples to a batch, not {shown(collate_fn)}")
    _check_data(training_data, ranks)
    order: _Order | None = None
    if not isinstance(training_data, IterableDataset):
        order = _Order(training_data, ranks.world_size, ranks.rank, shuffle=seed is not None, seed=seed or 0)
        if drop_last and len(order) < micro_batch_size:
            raise ValueError(
                f"drop_last leaves no batch: each of {ranks.world_size} ranks has {len(order)} samples, fewer than "
                f"the micro batch size {micro_batch_size}: lower it, or keep the last batch"
            )
    loader: DataLoader[Any] = DataLoader(
        training_data,
        batch_size=micro_batch_size,
        sampler=order,
        collate_fn=collate_fn,
        drop_last=drop_last,
        num_workers=num_workers,
        pin_memory=ranks.device.type != "cpu",
    )
    return TrainingLoader(loader, order)


def _check_data(data: Any, ranks: Ranks) -> None:
    if isinstance(data, (DataLoader, TrainingLoader)):
        raise TypeError(
            "training_data is a dataset, and this is a loader already: give its dataset and collate_fn, "
            "or leave training_data out and iterate over the loader"
        )
    if isinstance(data, IterableDataset):
        if ranks.world_size > 1:
            raise TypeError(
                f"an IterableDataset cannot be split over {ranks.world_size} ranks from outside, and each would read "
                f"all of it: leave training_data out, and give every rank a loader of its own samples"
            )
        return
    missing = [name for name in ("__getitem__", "__len__") if not hasattr(data, name)]
    # Every Dataset has a __getitem__, which may raise; so __len__ decides.
    if missing or isinstance(data, (str, bytes, dict)):
        needs = " and ".join(missing) if missing else "samples by number"
        hint = "" if isinstance(data, Dataset) else ", such as a torch Dataset or a list"
        raise TypeError(f"training_data must have {needs}{hint}, and {type(data).__name__} does not")
    if len(data) == 0:
        raise ValueError("training_data is empty: it needs at least one sample")

"""``deepspeed.runtime.dataloader``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from longshore.compat.absent import getter
from longshore.engine.data import TrainingLoader

DeepSpeedDataLoader = TrainingLoader


class RepeatingLoader:
    """A loader without an end: it begins anew where it stops.

    Args:
        loader: iterated over again and again; each time as it does by itself (``set_epoch`` is the script's).
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __len__(self) -> int:
        """Batches until it begins anew."""
        return len(self.loader)  # pyright: ignore[reportArgumentType]

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
__path__: list[str] = []

__getattr__ = getter(__name__)

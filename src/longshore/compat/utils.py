"""DeepSpeed's helpers that scripts use: logging, seeds, memory, a repeating loader, gradients."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longshore.compat.accelerator import get_accelerator
from longshore.utils import safe_get_full_grad, safe_set_full_grad

_GIB = 2**30
_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


class _StdoutHandler(logging.StreamHandler):  # pyright: ignore[reportMissingTypeArgument]
    """Writes to what ``sys.stdout`` is at the time of the call."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout
        super().emit(record)


def _make_logger() -> logging.Logger:
    made = logging.getLogger("DeepSpeed")
    if not made.handlers:
        handler = _StdoutHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        made.addHandler(handler)
        made.setLevel(logging.INFO)
        made.propagate = False  # a script that has handlers of its own would see each line twice
    return made


logger = _make_logger()


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks; None, or -1 among them: on all."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if ranks is None or rank in ranks or -1 in ranks:
        logger.log(level, f"[Rank {rank}] {message}")


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set ``"debug"``, ``"info"``, ``"warning"``, ``"error"`` or ``"critical"``; ValueError for others."""
    level = _LEVELS.get(log_level_str.lower())
    if level is None:
        raise ValueError(f"{log_level_str!r} is not a valid level; use one of {', '.join(_LEVELS)}")
    (custom_logger or logger).setLevel(level)


def set_random_seed(seed: int) -> None:
    """Seed Python's, NumPy's and torch's random number generators."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log, on rank 0, the memory allocated where the model trains, in GiB; only with ``force``, as in DeepSpeed."""
    if not force:
        return
    device = get_accelerator()
    now, most = device.memory_allocated() / _GIB, device.max_memory_allocated() / _GIB
    log_dist(f"{message}: {now:.2f} GiB allocated, {most:.2f} GiB at most", ranks=[0])


class RepeatingLoader:
    """An endless loader, which starts again where it ends.

    Args:
        loader: iterated over again and again, as it is (calling ``set_epoch`` is left to the script).
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __len__(self) -> int:
        """Batches until it starts again."""
        return len(self.loader)  # pyright: ignore[reportArgumentType]

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def safe_update_full_grad_vectorized(
    param_list: Iterable[Tensor], update_func: Callable[[Tensor, Any], Tensor]
) -> None:
    """Replace each parameter's gradient of this accumulation window by ``update_func(gradient, parameter)``.

    Parameters without a gradient are left out. All ranks have to call it.
    """
    for parameter in param_list:
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            safe_set_full_grad(parameter, update_func(gradient, parameter))

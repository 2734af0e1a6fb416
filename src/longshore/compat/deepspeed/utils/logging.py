"""``deepspeed.utils.logging``: a logger that prints, for scripts that talk through it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import torch.distributed as dist

from longshore.compat.absent import getter

_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


class _Standard(logging.StreamHandler):  # pyright: ignore[reportMissingTypeArgument]
    """Writes to what ``sys.stdout`` is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout
        super().emit(record)


def _made() -> logging.Logger:
    made = logging.getLogger("DeepSpeed")
    if not made.handlers:
        handler = _Standard(sys.stdout)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        made.addHandler(handler)
        made.setLevel(logging.INFO)
        made.propagate = False  # a script that has handlers of its own would see each line twice
    return made


logger = _made()


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks; None, or -1 among them: on all."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if ranks is None or rank in ranks or -1 in ranks:
        logger.log(level, f"[Rank {rank}] {message}")


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """``"debug"``, ``"info"``, ``"warning"``, ``"error"`` or ``"critical"``; ValueError for others."""
    level = _LEVELS.get(log_level_str.lower())
    if level is None:
        raise ValueError(f"{log_level_str!r} is no level; levels are {', '.join(_LEVELS)}")
    (custom_logger or logger).setLevel(level)


__all__ = ["log_dist", "logger", "set_log_level_from_string"]
__path__: list[str] = []

__getattr__ = getter(__name__)

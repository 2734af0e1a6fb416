"""Checks, before anything is trained, that all ranks are set up alike (law 11)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from torch import nn

from longshore.engine.config import Config
from longshore.engine.ranks import Ranks
from longshore.errors import RankError
from longshore.optim.host_optimizer import HostOptimizer


def check_same_setup(model: nn.Module, config: Config, ranks: Ranks) -> None:
    """Check that model and configuration are the same on all ranks; all have to call.

    Raises:
        RankError: says what differs, and on which ranks.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    parts = {
        "configuration": _digest(f"{name}={value!r}" for name, value in config.model_dump().items()),
        "model": _digest(f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors),
        "choice of trainable parameters": _digest(name for name, tensor in tensors if tensor.requires_grad),
    }
    _compare(parts, ranks, "build the same model and give initialize() the same configuration")


def check_same_parameters(optimizer: HostOptimizer, ranks: Ranks) -> None:
    """Check that the optimizer has the same parameters in the same order on all ranks; all have to call.

    Buckets are filled in that order: another one, as ``set(model.parameters())`` gives, would add up gradients of
    different parameters.

    Raises:
        RankError: names the ranks that differ.
    """
    lines = (f"{record.name} {list(record.shape)} {record.dtype}" for record in optimizer.records)
    sizes = (str(len(group["params"])) for group in optimizer.param_groups)
    parts = {"order of the optimizer's parameters": _digest(lines), "division into groups": _digest(sizes)}
    _compare(parts, ranks, "give its optimizer the same parameters in the same order (a list, never a set) and groups")


def _compare(parts: Mapping[str, bytes], ranks: Ranks, duty: str) -> None:
    rows = ranks.gather(parts)
    for what in parts:
        differing = [rank for rank, row in enumerate(rows) if row[what] != rows[0][what]]
        if differing:
            raise RankError(
                f"the {what} of rank {', '.join(map(str, differing))} is not that of rank 0; every rank has to {duty}"
            )


def _digest(lines: Iterable[str]) -> bytes:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).digest()

"""Checks, before anything is trained, that all ranks are set up alike (law 11)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from longshore.engine.config import Config
from longshore.engine.ranks import Ranks
from longshore.errors import RankError
from longshore.optim.host_optimizer import HostOptimizer

_DIGEST_BYTES = 16


def check_same_setup(model: nn.Module, config: Config, ranks: Ranks) -> None:
    """Check that model and configuration are the same on all ranks; all have to call.

    Raises:
        RankError: says what differs, and on which ranks.
    """
    if ranks.world_size == 1:
        return
    tensors = [*model.named_parameters(), *model.named_buffers()]
    parts = {
        "configuration": digest(f"{name}={value!r}" for name, value in config.model_dump().items()),
        "model": digest(f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors),
        "choice of trainable parameters": digest(name for name, tensor in tensors if tensor.requires_grad),
    }
    _compare(parts, ranks, "build the same model and give initialize() the same configuration")


def check_same_parameters(optimizer: HostOptimizer, ranks: Ranks) -> None:
    """Check that the optimizer has the same parameters in the same order on all ranks; all have to call.

    Buckets are filled in that order: another one, as ``set(model.parameters())`` gives, would add up gradients of
    different parameters.

    Raises:
        RankError: names the ranks that differ.
    """
    if ranks.world_size == 1:
        return
    lines = (f"{record.name} {list(record.shape)} {record.dtype}" for record in optimizer.records)
    sizes = (str(len(group["params"])) for group in optimizer.param_groups)
    parts = {"order of the optimizer's parameters": digest(lines), "division into groups": digest(sizes)}
    _compare(parts, ranks, "give its optimizer the same parameters in the same order (a list, never a set) and groups")


def _compare(parts: Mapping[str, bytes], ranks: Ranks, duty: str) -> None:
    rows = bytes_of_all_ranks(b"".join(parts.values()), ranks)
    for number, what in enumerate(parts):
        part = slice(number * _DIGEST_BYTES, (number + 1) * _DIGEST_BYTES)
        differing = [rank for rank, row in enumerate(rows) if row[part] != rows[0][part]]
        if differing:
            raise RankError(
                f"the {what} of rank {', '.join(map(str, differing))} is not that of rank 0; every rank has to {duty}"
            )


def bytes_of_all_ranks(mine: bytes, ranks: Ranks) -> list[bytes]:
    """Gather equally many bytes from each rank, by rank; all have to call."""
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(ranks.device)
    rows = [torch.empty_like(sent) for _ in range(ranks.world_size)]
    dist.all_gather(rows, sent, group=ranks.group)
    return [bytes(row.tolist()) for row in rows]


def digest(lines: Iterable[str]) -> bytes:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=_DIGEST_BYTES).digest()

"""Process groups of a lane's own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def twin_of(group: Any, device: torch.device, backend: str | None = None) -> Any:
    """A process group of the same ranks for one lane alone; all ranks have to call. ``backend``: other than theirs.

    Collectives of one group are told apart by their order only. The user's own (a mean of losses to log), and those
    of a second engine, run while the lane's are under way: in one group they would be taken for each other.
    """
    group = dist.group.WORLD if group is None else group
    ranks = dist.get_process_group_ranks(group)
    part = len(ranks) < dist.get_world_size()  # then the others need not call
    return dist.new_group(ranks, timeout=timeout_of(group, device), backend=backend, use_local_synchronization=part)


def group_of(ranks: list[int], like: Any, device: torch.device) -> Any:
    """A process group of some ranks of ``like``, which have to call, and whose order it takes."""
    return dist.new_group(ranks, timeout=timeout_of(like, device), use_local_synchronization=True)


def timeout_of(group: Any, device: torch.device) -> timedelta | None:
    """How long collectives of ``group`` wait, as its maker chose; None where torch does not say: torch's own default.

    torch (2.8 to 2.13) has a public way to set it, and none to ask. A new group does not inherit it.
    """
    try:
        found = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, timedelta) and found > timedelta(0) else None

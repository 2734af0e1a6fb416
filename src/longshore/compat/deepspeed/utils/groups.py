"""``deepspeed.utils.groups``: there is one group, of all ranks."""

from __future__ import annotations

import torch.distributed as dist

from longshore.compat.absent import getter


def get_data_parallel_group() -> dist.ProcessGroup | None:
    return dist.group.WORLD


def get_data_parallel_world_size() -> int:
    return dist.get_world_size()


def get_data_parallel_rank() -> int:
    return dist.get_rank()


def get_model_parallel_world_size() -> int:
    """Each rank runs whole batches."""
    return 1


def get_model_parallel_rank() -> int:
    return 0


get_tensor_model_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank

__all__ = [
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
]
__path__: list[str] = []

__getattr__ = getter(__name__)

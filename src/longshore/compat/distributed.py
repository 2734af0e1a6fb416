"""``deepspeed.init_distributed``, and what else of DeepSpeed asks which ranks there are."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from longshore.seam import DEFAULT_TIMEOUT, join
from longshore.seam import engine as own


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta = DEFAULT_TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the ranks, however they were started. Do nothing if there is a process group already.

    One rank without a launcher gets a process group of its own, as under DeepSpeed's launcher.

    Args:
        dist_backend: default: nccl for CUDA, gloo for the CPU; without CUDA, nccl means gloo.
        auto_mpi_discovery, verbose: accepted; launchers are always looked for, and nothing is printed.
        distributed_port: port of rank 0, if no launcher names one.
        timeout: timeout of each collective.
        init_method, rank, world_size: as in ``torch.distributed.init_process_group``, in place of a launcher.
        dist_init_required: False: the script makes the group itself.
        config: refused; it switches on the logging of communication.

    Raises:
        ValueError: variables contradict each other, or ``config`` is given.
        RendezvousError: the other ranks did not come in time.
    """
    if config is not None:
        raise ValueError("init_distributed(config=...) would log communication; use torch.profiler, and leave it out")
    if dist.is_initialized() or dist_init_required is False:
        return
    if dist_backend == "nccl" and not torch.cuda.is_available():
        dist_backend = "gloo"  # DeepSpeed's accelerator names the backend, whatever the script was written for
    if init_method not in (None, "env://") or rank >= 0 or world_size > 0:
        dist.init_process_group(dist_backend, init_method, timeout, world_size, rank)
        return
    own.init_distributed(dist_backend, distributed_port=distributed_port, timeout=timeout)
    if not dist.is_initialized():
        backend = dist_backend or dist.get_default_backend_for_device(join().device.type)
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)


class _EnvironmentFile(os.PathLike[str]):
    """The file with variables for DeepSpeed's launcher of several machines, which would run DeepSpeed itself."""

    def __fspath__(self) -> str:
        raise ValueError(
            "DeepSpeed's launcher of several machines would start ranks without longshore; give accelerate launch "
            "--deepspeed_multinode_launcher standard, on each machine"
        )


DEEPSPEED_ENVIRONMENT_NAME = _EnvironmentFile()


def get_world_group() -> dist.ProcessGroup | None:
    """Return the process group of all ranks."""
    return dist.group.WORLD


def get_local_rank() -> int:
    """Return the rank's number on its machine."""
    return join().local_rank

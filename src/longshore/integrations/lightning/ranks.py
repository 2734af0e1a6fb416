"""Processes and collectives of both strategies, the Trainer's and Fabric's."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longshore.engine.ranks import DEFAULT_TIMEOUT
from longshore.integrations.lightning.names import backend_for, connect, rank_zero_only, reduced, reset_seed


class RankMethods:
    """Base of both strategies, before Lightning's ``ParallelStrategy``, whose attributes it uses (``self: Any``).

    One device needs no process group, and gets none.
    """

    _backend: str | None = None
    _timeout: timedelta | None = DEFAULT_TIMEOUT
    _launcher_kind: Any = None
    _num_nodes = 1

    @property
    def root_device(self: Any) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.cluster_environment.local_rank() if self.cluster_environment else 0]

    @property
    def num_processes(self: Any) -> int:
        return len(self.parallel_devices or ())

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes  # Fabric sets it

    @property
    def is_distributed(self) -> bool:
        return self.num_processes * self.num_nodes > 1

    @property
    def distributed_sampler_kwargs(self: Any) -> dict[str, Any]:
        """Arguments of a ``DistributedSampler`` for the ranks of all machines."""
        return {"num_replicas": self.num_processes * self.num_nodes, "rank": self.global_rank}

    def _configure_launcher(self: Any) -> None:
        # If a launcher started this process, Lightning's launcher checks the number of processes.
        if self.is_distributed or self.cluster_environment.creates_processes_externally:
            self._launcher = self._launcher_kind(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self: Any) -> None:
        environment = self.cluster_environment
        if environment is not None:
            environment.set_global_rank(environment.node_rank() * self.num_processes + environment.local_rank())
            environment.set_world_size(self.num_nodes * self.num_processes)
            vars(rank_zero_only)["rank"] = environment.global_rank()

    _set_world_ranks = set_world_ranks
    """Fabric's name for it."""

    def setup_environment(self: Any) -> None:
        self.accelerator.setup_device(self.root_device)
        self.set_world_ranks()
        if self.is_distributed:
            reset_seed()  # as DDP does; strategies of one device do not
            self._backend = self._backend or backend_for(self.root_device)
            device = None if self.root_device.type == "cpu" else self.root_device
            connect(self.cluster_environment, self._backend, timeout=self._timeout, device_id=device)

    def barrier(self, *_: Any, **__: Any) -> None:
        if dist.is_available() and dist.is_initialized():
            dist.barrier(device_ids=[self.root_device.index] if dist.get_backend() == "nccl" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not (dist.is_available() and dist.is_initialized()):
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return reduced(tensor, group, reduce_op=reduce_op) if isinstance(tensor, Tensor) else tensor

    all_reduce = reduce
    """Fabric's name for it."""

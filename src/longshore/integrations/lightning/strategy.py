"""The base of both strategies, the Trainer's and Fabric's: arguments, processes and collectives."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longshore.engine import Config
from longshore.engine.ranks import DEFAULT_TIMEOUT
from longshore.integrations.lightning.models import Extras
from longshore.integrations.lightning.names import backend_for, connect, rank_zero_only, reduced, reset_seed
from longshore.integrations.lightning.settings import StrategySettings
from longshore.optim import Offload


class EngineStrategy:
    """Base of both strategies, before Lightning's ``ParallelStrategy``, whose attributes it uses (``self: Any``).

    Fields of :class:`longshore.Config` may be given by name. The default, without any and without a ``config``, is
    stage 2 with the optimizer's state in host memory. One device needs no process group, and gets none.

    Args:
        config: a DeepSpeed JSON file's path, its content, or a :class:`longshore.Config`. Values that Lightning's
            arguments decide (batches to accumulate, clipping, precision) may be left out or ``"auto"``.
        stage: what is sharded: 0: nothing; 1: optimizer state; 2: gradients too; 3: parameters too.
        offload_device: ``"cpu"`` or ``"none"``: where optimizer state lives and is stepped.
        offload, wrap_policy, weights: as in :func:`longshore.initialize`.
        accelerator, parallel_devices, cluster_environment, checkpoint_io: as in Lightning's own strategies.
            ``checkpoint_io`` writes weights-only files; folders are the engine's.
        process_group_backend: by default nccl for CUDA, gloo for the CPU.
        timeout: of the process group.
        fields: other fields of :class:`longshore.Config`, and ``precision_plugin`` (of a Trainer) or ``precision``
            (of Fabric) as in Lightning's own strategies.

    Raises:
        ConfigError: at once for a configuration that is wrong by itself; when training is set up for one that
            contradicts Lightning's arguments, with both values.
    """

    _launcher_kind: Any = None
    _num_nodes = 1

    def __init__(
        self,
        config: Mapping[str, Any] | str | os.PathLike[str] | Config | None = None,
        *,
        stage: int | None = None,
        offload_device: str | None = None,
        offload: Offload | None = None,
        wrap_policy: Any = None,
        weights: str | os.PathLike[str] | None = None,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        **fields: Any,
    ) -> None:
        plugin = {name: fields.pop(name) for name in ("precision", "precision_plugin") if name in fields}
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            **plugin,
        )
        self.settings = StrategySettings(config, {"stage": stage, "offload_device": offload_device, **fields})
        self._extras = Extras(offload, wrap_policy, weights)
        self._backend = process_group_backend
        self._timeout = timeout

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

"""The base of both strategies, the Trainer's and Fabric's: arguments, processes and collectives."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longshore import Config, Init, Offload
from longshore.integrations.lightning.names import EmptyInit, backend_for, connect, rank_zero_only, reduced, reset_seed
from longshore.integrations.lightning.settings import StrategySettings
from longshore.seam import DEFAULT_TIMEOUT

_OF_LIGHTNING = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io")
"""Arguments of both of Lightning's ``ParallelStrategy``; each has one more."""


class EngineStrategy:
    """Base of both strategies, before Lightning's ``ParallelStrategy``, whose attributes it uses (``self: Any``).

    Fields of :class:`longshore.Config` may be given by name. The default, without such fields and without a ``config``,
    is stage 2 with the optimizer's state in host memory. One device needs no process group, and gets none.

    Args:
        config: a DeepSpeed JSON file's path, its content, or a :class:`longshore.Config`. Values that Lightning's
            arguments decide (batches to accumulate, clipping, precision) may be left out or ``"auto"``.
        stage: what is sharded: 0: nothing; 1: optimizer state; 2: gradients too; 3: parameters too.
        offload_device: ``"cpu"`` or ``"none"``: where optimizer state lives and is stepped.
        offload, wrap_policy, weights: as in :func:`longshore.initialize`.
        process_group_backend: by default nccl for CUDA, gloo for the CPU.
        timeout: timeout of the process group's collectives.
        fields: other fields of :class:`longshore.Config`; and ``accelerator``, ``parallel_devices``,
            ``cluster_environment``, ``checkpoint_io`` and ``precision_plugin`` (for a Trainer) or ``precision`` (for
            Fabric), as in Lightning's own strategies. ``checkpoint_io`` writes weights-only files; folders are the
            engine's.

    Raises:
        ConfigError: at once for a configuration that is wrong by itself; when training is set up for one that
            contradicts Lightning's arguments, with both values.
    """

    _launcher_kind: Any = None
    _precision_argument = "precision_plugin"
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
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        **fields: Any,
    ) -> None:
        own = (*_OF_LIGHTNING, self._precision_argument)
        super().__init__(**{name: fields.pop(name) for name in own if name in fields})
        self.settings = StrategySettings(config, {"stage": stage, "offload_device": offload_device, **fields})
        self._extras = {"offload": offload, "wrap_policy": wrap_policy, "weights": weights}
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
    def distributed_sampler_kwargs(self: Any) -> dict[str, Any] | None:
        """The arguments of a ``DistributedSampler`` for the ranks of all machines."""
        return {"num_replicas": self.num_processes * self.num_nodes, "rank": self.global_rank}

    @contextlib.contextmanager
    def _creation(
        self: Any, uninitialized: bool | None, plugins: AbstractContextManager[Any]
    ) -> Generator[None, None, None]:
        """Enter a context for making a model: at stage 3 rank 0 makes it on the host, or no rank if files have it.

        Args:
            uninitialized: skip random initialization, for a model that will be loaded.
            plugins: the context of the precision plugin.
        """
        stage, from_files = self.settings.stage, self._extras["weights"] is not None
        with contextlib.ExitStack() as stack:
            if stage < 3:
                stack.enter_context(self.root_device)
            stack.enter_context(EmptyInit(enabled=bool(uninitialized)))
            stack.enter_context(Init(empty=from_files, enabled=stage == 3 or from_files))
            stack.enter_context(plugins)
            yield

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

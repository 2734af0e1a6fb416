"""``deepspeed.initialize`` and ``deepspeed.init_distributed``, on longshore's engine."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.optim import Optimizer

from longshore import engine as own
from longshore.compat.configuration import for_evaluation
from longshore.compat.engine_calls import answer_as_deepspeed
from longshore.compat.zero import policy_for
from longshore.engine import Config
from longshore.engine.config.load import read_config
from longshore.engine.ranks import DEFAULT_TIMEOUT, join
from longshore.engine.setup import Initialized
from longshore.errors import LongshoreError


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> Initialized:
    """Call :func:`longshore.initialize`, with DeepSpeed's choice if a script says something twice.

    An optimizer or a scheduler that is passed replaces the one that the configuration names, with a warning;
    ``model_parameters`` are ignored if an optimizer is passed. Afterwards there is a process group, for one rank too,
    since scripts use ``torch.distributed`` without checking.

    Without any optimizer, the engine is for evaluation and generation, sharded at stage 3: the second result is None,
    and ``backward()`` and ``step()`` raise LongshoreError.

    Raises:
        ConfigError, ValueError, TypeError: as :func:`longshore.initialize`.
    """
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    from_args = getattr(args, "deepspeed_config", None)
    given = [each for each in (config, config_params, from_args) if each is not None]
    if len(given) == 1:
        config, args = read_config(given[0])[1], None
    elif config is None:
        config = config_params  # longshore.initialize() raises if none is given, or several
    config = _without(config, "optimizer", "optimizer=", optimizer)
    config = _without(config, "scheduler", "lr_scheduler=", lr_scheduler)
    if isinstance(optimizer, Optimizer):
        model_parameters = None
    evaluates = optimizer is None and isinstance(config, Mapping) and not config.get("optimizer")
    if evaluates:
        config, lr_scheduler, model_parameters = for_evaluation(config), None, None
        optimizer = _never_stepped(model)
    made = own.initialize(
        args,
        model,
        optimizer,
        model_parameters,
        training_data,
        lr_scheduler,
        mpu=mpu,
        collate_fn=collate_fn,
        config=config,
        mesh_param=mesh_param,
        wrap_policy=policy_for(model, config),
    )
    answer_as_deepspeed(made.engine, config, optimizer)
    if evaluates:
        made.engine.backward = made.engine.step = _without_optimizer
        return made._replace(optimizer=None)
    return made


def _never_stepped(model: nn.Module | None) -> Optimizer:
    """Return the optimizer that an engine needs, for one that never steps, with as little state as there can be."""
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    trainable = [each for each in parameters if each.requires_grad]
    least = min(trainable or parameters, key=torch.numel, default=nn.Parameter(torch.zeros(1)))
    return torch.optim.SGD([least], lr=0.0)


def _without_optimizer(*_: Any, **__: Any) -> NoReturn:
    raise LongshoreError(
        "this engine was made without an optimizer, for evaluation and generation only; name one in the configuration "
        "or pass initialize(optimizer=...)"
    )


def _without(config: Any, section: str, argument: str, given: Any) -> Any:
    """Return the configuration without a section that the argument replaces."""
    if given is None or isinstance(config, Config) or not isinstance(config, Mapping) or not config.get(section):
        return config
    warnings.warn(
        f"the configuration names {'an' if section == 'optimizer' else 'a'} {section}, and {argument} is passed, which "
        "is used, as in DeepSpeed; remove one of them",
        stacklevel=3,
    )
    return {key: value for key, value in config.items() if key != section}


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
        backend = dist_backend or ("nccl" if join().device.type == "cuda" else "gloo")
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

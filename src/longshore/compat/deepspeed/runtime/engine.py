"""``deepspeed.runtime.engine``: ``initialize`` with DeepSpeed's choices, and the engine's name there."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from longshore.compat.absent import getter
from longshore.compat.deepspeed.comm import init_distributed
from longshore.compat.leaves import policy_for
from longshore.engine import Config, Engine, add_config_arguments
from longshore.engine import initialize as _initialize
from longshore.engine.config.load import read_file
from longshore.engine.setup import Initialized
from longshore.optim.host_optimizer import HostOptimizer

DeepSpeedEngine = Engine
DeepSpeedOptimizer = HostOptimizer
_DEFAULT_PORT = 29500


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = _DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> Initialized:
    """:func:`longshore.initialize`, which decides as DeepSpeed does where a script says something twice.

    An optimizer or a scheduler that is passed stands in for the one that the configuration names (a warning says so),
    and ``model_parameters`` for nothing where an optimizer is passed. After it there is a process group, for one rank
    too, since scripts use ``torch.distributed`` without asking.

    Raises:
        ConfigError, ValueError, TypeError: as :func:`longshore.initialize`.
    """
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    config, args = _chosen(args, config, config_params)
    config = _without(config, "optimizer", optimizer)
    config = _without(config, "scheduler", lr_scheduler)
    if isinstance(optimizer, Optimizer):
        model_parameters = None
    return _initialize(
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


def _chosen(args: Any, config: Any, config_params: Any) -> tuple[Any, Any]:
    """The one configuration, read, and ``args`` without it; where there is none or there are two, as they came."""
    from_args = getattr(args, "deepspeed_config", None)
    given = [each for each in (config, config_params, from_args) if each is not None]
    if len(given) != 1:
        return config if config is not None else config_params, args
    (only,) = given
    if isinstance(only, (str, os.PathLike)):
        only = read_file(Path(only))
    return only, None


def _without(config: Any, section: str, given: Any) -> Any:
    if given is None or isinstance(config, Config) or not isinstance(config, Mapping) or not config.get(section):
        return config
    warnings.warn(
        f"the configuration names {_article(section)}, and {_argument(section)} is passed, which is used, as in "
        "DeepSpeed; remove one of them",
        stacklevel=3,
    )
    return {key: value for key, value in config.items() if key != section}


def _article(section: str) -> str:
    return f"an {section}" if section == "optimizer" else f"a {section}"


def _argument(section: str) -> str:
    return "optimizer=" if section == "optimizer" else "lr_scheduler="


__all__ = ["DeepSpeedEngine", "DeepSpeedOptimizer", "add_config_arguments", "initialize"]
__path__: list[str] = []

__getattr__ = getter(__name__)

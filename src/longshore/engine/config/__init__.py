"""The configuration: one typed model. ``load_config`` is the door's, which translates DeepSpeed's files into it."""

from typing import TYPE_CHECKING, Any

from longshore.engine.config.base import ConfigError, Problem
from longshore.engine.config.model import (
    Config,
    CsvConfig,
    FlopsProfilerConfig,
    LossScaling,
    TensorBoardConfig,
    WandbConfig,
)
from longshore.engine.config.optimizers import OPTIMIZER_CONFIGS, OptimizerConfig
from longshore.engine.config.schedulers import (
    LRRangeTestConfig,
    OneCycleConfig,
    SchedulerConfig,
    WarmupCosineLRConfig,
    WarmupDecayLRConfig,
    WarmupLRConfig,
)
from longshore.lazily import lazily

if TYPE_CHECKING:
    from longshore.compat.config.load import LoadedConfig as LoadedConfig
    from longshore.compat.config.load import load_config as load_config

__all__ = [
    "Config",
    "ConfigError",
    "CsvConfig",
    "FlopsProfilerConfig",
    "LRRangeTestConfig",
    "LoadedConfig",
    "LossScaling",
    "OneCycleConfig",
    "OptimizerConfig",
    "Problem",
    "SchedulerConfig",
    "TensorBoardConfig",
    "WandbConfig",
    "WarmupCosineLRConfig",
    "WarmupDecayLRConfig",
    "WarmupLRConfig",
    "load_config",
]


_of_door = lazily(globals(), {"longshore.compat.config.load": "LoadedConfig load_config"})


def __getattr__(name: str) -> Any:
    """Return a class such as ``AdamWConfig``, which is made from an optimizer, or a name of the door's."""
    if name.endswith("Config") and (kind := name.removesuffix("Config")) in OPTIMIZER_CONFIGS:
        return OPTIMIZER_CONFIGS[kind]
    return _of_door(name)

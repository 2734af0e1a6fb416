"""The configuration: one typed model, and the DeepSpeed file translated into it at the edge."""

from typing import Any

import longshore.engine.config.optimizers as _optimizers
from longshore.engine.config.base import ConfigError, Problem
from longshore.engine.config.load import LoadedConfig, load_config
from longshore.engine.config.model import Config, CsvConfig, LossScaling, TensorBoardConfig, WandbConfig
from longshore.engine.config.optimizers import OptimizerConfig
from longshore.engine.config.schedulers import (
    LRRangeTestConfig,
    OneCycleConfig,
    SchedulerConfig,
    WarmupCosineLRConfig,
    WarmupDecayLRConfig,
    WarmupLRConfig,
)

__all__ = [
    "Config",
    "ConfigError",
    "CsvConfig",
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


def __getattr__(name: str) -> Any:
    """``AdamWConfig`` and so on, which are made from the optimizers."""
    return getattr(_optimizers, name)

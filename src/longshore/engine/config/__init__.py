"""The configuration: one typed model, and the translation of DeepSpeed files into it."""

from typing import Any

from longshore.engine.config.base import ConfigError, Problem
from longshore.engine.config.load import LoadedConfig, load_config
from longshore.engine.config.model import (
    Config,
    CsvConfig,
    FlopsProfilerConfig,
    LossScaling,
    TensorBoardConfig,
    WandbConfig,
)
from longshore.engine.config.optimizers import OPTIMIZERS, OptimizerConfig
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


def __getattr__(name: str) -> Any:
    """Return a class such as ``AdamWConfig``, which is made from an optimizer."""
    if name.endswith("Config") and (kind := name.removesuffix("Config")) in OPTIMIZERS:
        return OPTIMIZERS[kind]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

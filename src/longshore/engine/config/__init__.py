"""The configuration: one typed model, and the DeepSpeed file translated into it at the edge."""

from longshore.engine.config.base import ConfigError, Problem
from longshore.engine.config.load import LoadedConfig, load_config
from longshore.engine.config.model import Config, CsvConfig, LossScaling, TensorBoardConfig, WandbConfig
from longshore.engine.config.optimizers import (
    AdagradConfig,
    AdamConfig,
    AdamWConfig,
    LionConfig,
    OptimizerConfig,
    SGDConfig,
)
from longshore.engine.config.schedulers import (
    LRRangeTestConfig,
    OneCycleConfig,
    SchedulerConfig,
    WarmupCosineLRConfig,
    WarmupDecayLRConfig,
    WarmupLRConfig,
)

__all__ = [
    "AdagradConfig",
    "AdamConfig",
    "AdamWConfig",
    "Config",
    "ConfigError",
    "CsvConfig",
    "LRRangeTestConfig",
    "LionConfig",
    "LoadedConfig",
    "LossScaling",
    "OneCycleConfig",
    "OptimizerConfig",
    "Problem",
    "SGDConfig",
    "SchedulerConfig",
    "TensorBoardConfig",
    "WandbConfig",
    "WarmupCosineLRConfig",
    "WarmupDecayLRConfig",
    "WarmupLRConfig",
    "load_config",
]

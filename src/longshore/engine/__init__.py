"""The engine, which trains one model on several ranks, with DeepSpeed's configuration files and calls."""

from longshore.engine.config import Config, ConfigError
from longshore.engine.creation import Init
from longshore.engine.engine import Engine
from longshore.engine.ranks import init_distributed
from longshore.engine.setup import add_config_arguments, initialize

__all__ = ["Config", "ConfigError", "Engine", "Init", "add_config_arguments", "init_distributed", "initialize"]

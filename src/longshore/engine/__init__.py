"""The engine, which trains one model on several ranks."""

from longshore.engine.config.base import ConfigError
from longshore.engine.config.model import Config
from longshore.engine.creation import Init
from longshore.engine.engine import Engine
from longshore.engine.ranks import init_distributed
from longshore.engine.setup import make

__all__ = ["Config", "ConfigError", "Engine", "Init", "init_distributed", "make"]

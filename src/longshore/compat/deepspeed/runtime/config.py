"""``deepspeed.runtime.config``."""

from longshore.compat.absent import getter
from longshore.engine import ConfigError

DeepSpeedConfigError = ConfigError

__all__ = ["DeepSpeedConfigError"]
__path__: list[str] = []  # so that what cannot be imported from here is looked for, and named

__getattr__ = getter(__name__)

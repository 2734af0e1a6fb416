"""``deepspeed.runtime.zero.partition_parameters``."""

from longshore.compat.absent import getter
from longshore.compat.deepspeed.zero import GatheredParameters, Init

__all__ = ["GatheredParameters", "Init"]
__path__: list[str] = []

__getattr__ = getter(__name__)

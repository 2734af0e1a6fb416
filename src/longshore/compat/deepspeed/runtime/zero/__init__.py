"""``deepspeed.runtime.zero``."""

from longshore.compat.absent import getter
from longshore.compat.deepspeed.runtime.zero import partition_parameters
from longshore.compat.deepspeed.zero import GatheredParameters, Init

__all__ = ["GatheredParameters", "Init", "partition_parameters"]

__getattr__ = getter(__name__)

"""``deepspeed.runtime``."""

from longshore.compat.absent import getter
from longshore.compat.deepspeed.runtime import config, dataloader, engine, lr_schedules, utils, zero

__all__ = ["config", "dataloader", "engine", "lr_schedules", "utils", "zero"]

__getattr__ = getter(__name__)

"""``deepspeed.runtime.activation_checkpointing``."""

from longshore.compat.absent import getter
from longshore.compat.deepspeed import checkpointing

__all__ = ["checkpointing"]

__getattr__ = getter(__name__)

"""``deepspeed.runtime.activation_checkpointing.checkpointing``, the long name of ``deepspeed.checkpointing``."""

from longshore.checkpointing import checkpoint, configure, is_configured, reset
from longshore.compat.absent import getter

__all__ = ["checkpoint", "configure", "is_configured", "reset"]
__path__: list[str] = []

__getattr__ = getter(__name__)

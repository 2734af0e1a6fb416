"""``deepspeed.ops``."""

from longshore.compat.absent import getter
from longshore.compat.deepspeed.ops import adagrad, adam, lion

__all__ = ["adagrad", "adam", "lion"]

__getattr__ = getter(__name__)

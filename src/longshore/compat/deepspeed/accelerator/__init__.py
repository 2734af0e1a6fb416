"""``deepspeed.accelerator``: the kind of device that the run trains on."""

from __future__ import annotations

from longshore.compat.absent import getter
from longshore.compat.deepspeed.accelerator.real_accelerator import DeepSpeedAccelerator, get_accelerator

__all__ = ["DeepSpeedAccelerator", "get_accelerator"]

__getattr__ = getter(__name__)

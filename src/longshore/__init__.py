"""ZeRO-style sharded, CPU-offloaded training for PyTorch, bit for bit."""

from longshore.errors import (
    BrokenStateError,
    GradientError,
    IllegalTransitionError,
    LongshoreError,
    ParameterError,
)
from longshore.optim import Adam, AdamW, Offload
from longshore.transfer import SimulatedTransfer

__version__ = "0.1.0"

__all__ = [
    "Adam",
    "AdamW",
    "BrokenStateError",
    "GradientError",
    "IllegalTransitionError",
    "LongshoreError",
    "Offload",
    "ParameterError",
    "SimulatedTransfer",
]

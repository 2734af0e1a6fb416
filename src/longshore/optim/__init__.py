"""``torch.optim.Optimizer`` drop-ins built from the host store and a transfer."""

from longshore.optim.adam import Adam, AdamW
from longshore.optim.offload import Offload

__all__ = ["Adam", "AdamW", "Offload"]

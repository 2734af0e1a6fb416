"""``transformers.Trainer`` on longshore's engine: ZeRO-1, 2 and 3, offloaded, with the Trainer's own arguments."""

from longshore.integrations.transformers.trainer import Trainer, TrainerMixin

__all__ = ["Trainer", "TrainerMixin"]

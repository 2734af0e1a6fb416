"""What can be read of an engine, under the names that scripts use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longshore.engine.batch_sizes import BatchSizes
from longshore.engine.config import Config
from longshore.engine.loss_scale import LossScale
from longshore.engine.ranks import Ranks
from longshore.optim.host_optimizer import HostOptimizer


class Readings:
    """Of an engine, which has these."""

    optimizer: HostOptimizer
    config: Config
    ranks: Ranks
    loss_scaling: LossScale
    micro_steps: int
    _sizes: BatchSizes
    _norm: Tensor | None
    _clip: float | None

    def get_global_grad_norm(self) -> float | None:
        """The norm that the last applied or skipped step measured, before clipping; None where it measured none."""
        return None if self._norm is None else float(self._norm)

    def get_lr(self) -> list[float]:
        """Of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def loss_scale(self) -> float:
        return self.loss_scaling.value

    @property
    def cur_scale(self) -> float:
        return self.loss_scaling.value

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    @property
    def local_rank(self) -> int:
        return self.ranks.local_rank

    @property
    def global_rank(self) -> int:
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        return self.ranks.world_size

    @property
    def global_samples(self) -> int:
        return self.micro_steps * self._sizes.micro_batch_size * self._sizes.world_size

    def get_mom(self) -> list[Any]:
        """Betas, or momentum, of each group."""
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    def gradient_clipping(self) -> float | None:
        return self._clip

    def dynamic_loss_scale(self) -> bool:
        return self.config.loss_scaling is not None and self.config.loss_scaling.scale is None

    def fp16_enabled(self) -> bool:
        return "fp16" in (self.config.dtype, self.config.autocast)

    def bfloat16_enabled(self) -> bool:
        return self.config.dtype == "bf16"

    def steps_per_print(self) -> int | None:
        return self.config.steps_per_print

    def zero_optimization_stage(self) -> int:
        return self.config.stage

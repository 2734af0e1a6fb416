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


class Scale(float):
    """A number, and called it is the same number: DeepSpeed's engine has a method ``loss_scale()``."""

    def __call__(self) -> float:
        return float(self)


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
        """The learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def loss_scale(self) -> Scale:
        """What losses are multiplied by before backward, 1.0 without a scaler; it may also be called."""
        return Scale(self.loss_scaling.value)

    @property
    def cur_scale(self) -> float:
        """Another name of ``loss_scale``."""
        return self.loss_scaling.value

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.ranks.device

    @property
    def local_rank(self) -> int:
        """This rank among those of its machine."""
        return self.ranks.local_rank

    @property
    def global_rank(self) -> int:
        """This rank among all."""
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.ranks.world_size

    @property
    def global_samples(self) -> int:
        """Samples that all ranks have run backward for."""
        return self.micro_steps * self._sizes.micro_batch_size * self._sizes.world_size

    def get_mom(self) -> list[Any]:
        """Betas, or momentum, of each group."""
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    def gradient_clipping(self) -> float | None:
        """The largest global norm; None: no clipping."""
        return self._clip

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts to overflows."""
        return self.config.loss_scaling is not None and self.config.loss_scaling.scale is None

    def fp16_enabled(self) -> bool:
        """Whether parameters or autocast are fp16."""
        return "fp16" in (self.config.dtype, self.config.autocast)

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bf16."""
        return self.config.dtype == "bf16"

    def steps_per_print(self) -> int | None:
        """Steps between printed lines; None: none are printed."""
        return self.config.steps_per_print

    def zero_optimization_stage(self) -> int:
        """0, 1, 2 or 3."""
        return self.config.stage

"""``deepspeed.ops.adagrad``."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from longshore.compat.absent import getter
from longshore.compat.standalone import check_alone
from longshore.optim import Adagrad


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad with DeepSpeed's arguments; ``initialize()`` puts longshore's in its place.

    Args:
        model_params: parameters or groups.
        amsgrad: True is refused: Adagrad has no such variant.
        fp32_optimizer_states: False is refused.
    """

    longshore_kind = Adagrad

    def __init__(
        self,
        model_params: ParamsT,
        lr: Any = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad or not fp32_optimizer_states:
            raise ValueError("DeepSpeedCPUAdagrad: sums are float32, and there is no amsgrad; leave both out")
        super().__init__(model_params, lr, weight_decay=weight_decay, eps=eps)

    def step(self, closure: Any = None) -> Any:
        """Of a script that has no engine: torch's fused one, on float32 parameters; ValueError for others."""
        check_alone(self)
        return super().step(closure)


__all__ = ["DeepSpeedCPUAdagrad"]
__path__: list[str] = []

__getattr__ = getter(__name__)

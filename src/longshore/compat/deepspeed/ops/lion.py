"""``deepspeed.ops.lion``: longshore's Lion with DeepSpeed's arguments."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import ParamsT

from longshore.compat.absent import getter
from longshore.optim import Lion


class DeepSpeedCPULion(Lion):
    """Args: ``model_params``: parameters or groups; ``fp32_optimizer_states``: False is refused."""

    longshore_kind = Lion

    def __init__(
        self,
        model_params: ParamsT,
        lr: Any = 1e-3,
        betas: Any = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            raise ValueError("DeepSpeedCPULion: the moment is float32; leave fp32_optimizer_states out")
        super().__init__(model_params, lr, betas, weight_decay)


class FusedLion(Lion):
    """Args: ``params``: parameters or groups; ``set_grad_none``: False is refused."""

    longshore_kind = Lion

    def __init__(
        self,
        params: ParamsT,
        lr: Any = 1e-3,
        betas: Any = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        if not set_grad_none:
            raise ValueError("FusedLion: zero_grad() sets gradients to None; leave set_grad_none out")
        super().__init__(params, lr, betas, weight_decay)


__all__ = ["DeepSpeedCPULion", "FusedLion"]
__path__: list[str] = []

__getattr__ = getter(__name__)

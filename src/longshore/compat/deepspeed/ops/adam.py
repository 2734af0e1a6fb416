"""``deepspeed.ops.adam``: Adam and AdamW with DeepSpeed's arguments.

Given to ``initialize()`` they are longshore's, which keep their state where
the configuration says, so that one is as good as the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from longshore.compat.absent import getter
from longshore.compat.standalone import check_alone
from longshore.optim import Adam


class _Adam(torch.optim.Adam):
    """torch's, until an engine takes its place."""

    def __init__(
        self,
        params: ParamsT,
        lr: Any,
        betas: Any,
        eps: float,
        weight_decay: float,
        amsgrad: bool,
        decoupled: bool,
        bias_correction: bool,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=decoupled)
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)

    def step(self, closure: Any = None) -> Any:
        """Of a script that has no engine: torch's fused one, on float32 parameters.

        Raises:
            ValueError: other parameters, or ``bias_correction=False``.
        """
        check_alone(self)
        return super().step(closure)


class DeepSpeedCPUAdam(_Adam):
    """AdamW, or with ``adamw_mode=False`` Adam.

    Args:
        model_params: parameters or groups.
        fp32_optimizer_states: False is refused.
    """

    longshore_kind = Adam

    def __init__(
        self,
        model_params: ParamsT,
        lr: Any = 1e-3,
        bias_correction: bool = True,
        betas: Any = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            raise ValueError("DeepSpeedCPUAdam: moments are float32; leave fp32_optimizer_states out")
        super().__init__(model_params, lr, betas, eps, weight_decay, amsgrad, adamw_mode, bias_correction)


class FusedAdam(_Adam):
    """AdamW, or with ``adam_w_mode=False`` Adam.

    Args:
        params: parameters or groups.
        set_grad_none: False is refused: ``zero_grad()`` drops gradients.
    """

    longshore_kind = Adam

    def __init__(
        self,
        params: ParamsT,
        lr: Any = 1e-3,
        bias_correction: bool = True,
        betas: Any = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not set_grad_none:
            raise ValueError("FusedAdam: zero_grad() sets gradients to None; leave set_grad_none out")
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, adam_w_mode, bias_correction)


__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
__path__: list[str] = []

__getattr__ = getter(__name__)

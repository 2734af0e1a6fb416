"""DeepSpeed's optimizer classes, with its arguments.

``initialize()`` replaces them by longshore's (``longshore_kind``), which keep their state where the configuration
says. Without an engine, Adam and Adagrad step as torch's fused optimizers, and Lion as longshore's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from longshore.optim import Adagrad, Adam, Lion


class _TorchAdam(torch.optim.Adam):
    """Base of the two Adams: torch's, until an engine replaces it."""

    def __init__(self, params: ParamsT, *options: Any, decoupled: bool, bias_correction: bool) -> None:
        super().__init__(params, *options, decoupled_weight_decay=decoupled)
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)

    def step(self, closure: Any = None) -> Any:
        """Step without an engine: torch's fused step, on float32 parameters.

        Raises:
            ValueError: other parameters, or ``bias_correction=False``.
        """
        _check_alone(self)
        return super().step(closure)


class DeepSpeedCPUAdam(_TorchAdam):
    """AdamW, or with ``adamw_mode=False`` Adam.

    Args:
        model_params: parameters or groups.
        fp32_optimizer_states: False is refused.
    """

    longshore_kind = Adam  # read from the class itself: a subclass may step differently, and is refused

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
        options = (lr, betas, eps, weight_decay, amsgrad)
        super().__init__(model_params, *options, decoupled=adamw_mode, bias_correction=bias_correction)


class FusedAdam(_TorchAdam):
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
        options = (lr, betas, eps, weight_decay, amsgrad)
        super().__init__(params, *options, decoupled=adam_w_mode, bias_correction=bias_correction)


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad.

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
        """Step without an engine: torch's fused step, on float32 parameters; ValueError for others."""
        _check_alone(self)
        return super().step(closure)


class DeepSpeedCPULion(Lion):
    """Lion. Args: ``model_params``: parameters or groups; ``fp32_optimizer_states``: False is refused."""

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
    """Lion. Args: ``params``: parameters or groups; ``set_grad_none``: False is refused."""

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


def _check_alone(optimizer: torch.optim.Optimizer) -> None:
    """Check that torch's own step gives what was asked for, and have it be the fused one.

    Raises:
        ValueError: it does not.
    """
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if not group.get("bias_correction", True):
            raise ValueError(
                f"{name} without an engine is torch's, which always corrects; use longshore.Adam, or initialize()"
            )
        for parameter in group["params"]:
            if parameter.dtype != torch.float32:
                raise ValueError(
                    f"{name} without an engine would keep its moments in {parameter.dtype}, as torch does; use "
                    "longshore.Adam or Adagrad, which keep float32 masters, or initialize()"
                )
        if group.get("fused") is None and all(each.device.type in ("cpu", "cuda") for each in group["params"]):
            group["fused"] = True

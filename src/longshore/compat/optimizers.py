"""DeepSpeed's optimizer classes, with its arguments.

``initialize()`` replaces them by longshore's (``longshore_kind``), which keep their state where the configuration
says. Without an engine, Adam and Adagrad step as torch's fused optimizers, and Lion as longshore's own.

``params`` and ``model_params`` are parameters or groups. The format of states is one of the configuration's settings,
so ``fp32_optimizer_states=False`` is refused, and ``zero_grad()`` always sets gradients to None, so
``set_grad_none=False`` is refused. Both raise ValueError.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from longshore import Adagrad, Adam, Lion
from longshore.seam import IN_PLACE_OF, check_no_own_step, is_accelerates_mapping, steps_as


class _TorchStep:
    """A mixin of torch's optimizers, which step only if no engine has replaced them."""

    def step(self: Any, closure: Any = None) -> Any:
        """Step without an engine: torch's fused step, on float32 parameters.

        Raises:
            ValueError: a parameter of another dtype, or ``bias_correction=False``.
        """
        name = type(self).__name__
        for group in self.param_groups:
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
        return super().step(closure)  # pyright: ignore[reportAttributeAccessIssue]


class _TorchAdam(_TorchStep, torch.optim.Adam):
    def __init__(self, params: ParamsT, *options: Any, decoupled: bool, bias_correction: bool) -> None:
        super().__init__(params, *options, decoupled_weight_decay=decoupled)
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)


class DeepSpeedCPUAdam(_TorchAdam):
    """AdamW, or with ``adamw_mode=False`` Adam."""

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
        _check_options("DeepSpeedCPUAdam", fp32_optimizer_states=fp32_optimizer_states)
        replaced = _Replaced(sys._getframe(1), "Adam", torch.optim.Adam, torch.optim.AdamW, also=adamw_mode)
        options = (lr, betas, eps, weight_decay, amsgrad)
        super().__init__(model_params, *options, decoupled=adamw_mode, bias_correction=bias_correction)
        replaced.hand_over(self)


class FusedAdam(_TorchAdam):
    """AdamW, or with ``adam_w_mode=False`` Adam."""

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
        _check_options("FusedAdam", set_grad_none=set_grad_none)
        options = (lr, betas, eps, weight_decay, amsgrad)
        super().__init__(params, *options, decoupled=adam_w_mode, bias_correction=bias_correction)


class DeepSpeedCPUAdagrad(_TorchStep, torch.optim.Adagrad):
    """Adagrad. Raises ValueError for ``amsgrad=True``, which Adagrad does not have."""

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
        if amsgrad:
            raise ValueError("DeepSpeedCPUAdagrad: there is no amsgrad for Adagrad; leave it out")
        _check_options("DeepSpeedCPUAdagrad", fp32_optimizer_states=fp32_optimizer_states)
        replaced = _Replaced(sys._getframe(1), "Adagrad", torch.optim.Adagrad, also=True)
        super().__init__(model_params, lr, weight_decay=weight_decay, eps=eps)
        replaced.hand_over(self)


class DeepSpeedCPULion(Lion):
    """Lion."""

    longshore_kind = Lion

    def __init__(
        self,
        model_params: ParamsT,
        lr: Any = 1e-3,
        betas: Any = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _check_options("DeepSpeedCPULion", fp32_optimizer_states=fp32_optimizer_states)
        super().__init__(model_params, lr, betas, weight_decay)


class FusedLion(Lion):
    """Lion."""

    longshore_kind = Lion

    def __init__(
        self,
        params: ParamsT,
        lr: Any = 1e-3,
        betas: Any = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        _check_options("FusedLion", set_grad_none=set_grad_none)
        super().__init__(params, lr, betas, weight_decay)


def _check_options(name: str, **options: bool) -> None:
    why = {
        "fp32_optimizer_states": "the engine's configuration says which format its states have: set "
        "zero_optimization.offload_optimizer.states to bf16",
        "set_grad_none": "zero_grad() always sets gradients to None",
    }
    for option, value in options.items():
        if not value:
            raise ValueError(f"{name}: {why[option]}; leave {option} out")


class _Replaced:
    """The optimizer, if there is one, in whose place Accelerate makes this one, as it does with offload in the file.

    It knows torch's Adam, AdamW and Adagrad, their subclasses, and 32-bit optimizers of bitsandbytes, and makes Adam of
    every other.
    """

    def __init__(self, caller: FrameType, name: str, *bases: type, also: bool = False) -> None:
        """Check it; ``bases`` are the classes of torch that step as DeepSpeed's ``name``.

        Raises:
            ValueError: it steps otherwise; it would be replaced by an optimizer with other results.
        """
        self.optimizer: Any = caller.f_locals.get("optimizer") if is_accelerates_mapping(caller) else None
        if self.optimizer is None:
            return
        kind = type(self.optimizer)
        if also and kind.__module__.partition(".")[0] == "bitsandbytes":
            return
        if not any(steps_as(kind, base) for base in bases):
            if kind is getattr(torch.optim, kind.__name__, None):
                raise ValueError(
                    f"Accelerate replaces {kind.__name__} by DeepSpeed's {name}, which steps differently, because the "
                    'file has offload_optimizer: set "zero_force_ds_cpu_optimizer" to false in it to keep the '
                    f"optimizer, or train with {bases[-1].__name__}"
                )
            raise ValueError(
                f"Accelerate replaces {kind.__name__}, which has a step of its own, by DeepSpeed's {name}, because the "
                f"file has offload_optimizer: train with torch.optim.{bases[-1].__name__} itself"
            )
        check_no_own_step(self.optimizer)

    def hand_over(self, made: Any) -> None:
        """Give ``made`` the state that there is already, and make what is done to the optimizer later count."""
        if self.optimizer is not None:
            # For groups that are added later; Accelerate passes on the rate and the decay only.
            defaults = self.optimizer.defaults
            made.defaults.update((name, defaults[name]) for name in made.defaults.keys() & defaults.keys())
            made.state.update(self.optimizer.state)
            vars(made)[IN_PLACE_OF] = self.optimizer

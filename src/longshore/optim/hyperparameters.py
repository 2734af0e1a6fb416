"""What a parameter group may say: honoured, or refused by name."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from longshore.kernels import AdamRule

_REFUSED = {
    "amsgrad": "the maximum of second moments is not kept; use amsgrad=False",
    "capturable": "a step that runs on the host cannot be captured in a CUDA graph; use capturable=False",
    "differentiable": "autograd cannot see a step that runs on the host; use differentiable=False",
    "foreach": "longshore always runs one fused pass; leave foreach unset",
}

IMPLEMENTATION_FLAGS = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
"""How torch computes a step, not what: taken from here, never from a loaded state."""


def _scalar(value: Any, name: str) -> float:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} as a tensor has one element, not {value.numel()}")
        return float(value.item())
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a number or a one-element tensor, not {type(value).__name__}")
    return float(value)


def check_group(group: dict[str, Any]) -> None:
    """Refuse what cannot be honoured, by name.

    Raises:
        ValueError: an option that longshore does not do, or a value out of range.
        TypeError: something that is not a number.
    """
    for name, why in _REFUSED.items():
        if group.get(name):
            raise ValueError(f"{name}={group[name]} is not supported: {why}")
    if group.get("fused") is False:
        raise ValueError("fused=False is not supported: longshore always runs one fused pass; leave fused unset")
    for name in ("lr", "eps", "weight_decay"):
        value = _scalar(group[name], name)
        if not value >= 0.0:
            raise ValueError(f"{name} must not be negative, and is {value}")
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas is a pair, not {betas!r}")
    for index, beta in enumerate(betas):
        value = _scalar(beta, f"betas[{index}]")
        if not 0.0 <= value < 1.0:
            raise ValueError(f"betas[{index}] must be at least 0 and below 1, and is {value}")


def rule_of(group: dict[str, Any], step: int) -> AdamRule:
    """The group's hyper-parameters as they are now, for parameters whose step count becomes ``step``."""
    beta1, beta2 = group["betas"]
    return AdamRule(
        lr=_scalar(group["lr"], "lr"),
        beta1=_scalar(beta1, "betas[0]"),
        beta2=_scalar(beta2, "betas[1]"),
        eps=_scalar(group["eps"], "eps"),
        weight_decay=_scalar(group["weight_decay"], "weight_decay"),
        step=step,
        decoupled=bool(group["decoupled_weight_decay"]),
        maximize=bool(group["maximize"]),
    )

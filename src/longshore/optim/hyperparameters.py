"""What a parameter group may say: honoured, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_REFUSED = {
    "amsgrad": "the maximum of second moments is not kept; use amsgrad=False",
    "capturable": "a step that runs on the host cannot be captured in a CUDA graph; use capturable=False",
    "differentiable": "autograd cannot see a step that runs on the host; use differentiable=False",
    "foreach": "longshore always runs one fused pass; leave foreach unset",
}

IMPLEMENTATION_FLAGS = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
"""How torch computes a step, not what: taken from here, never from a loaded state."""


def implementation_flags(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the flags that an optimizer with these defaults has."""
    return {name: value for name, value in IMPLEMENTATION_FLAGS.items() if name in defaults}


_OF_THE_WHOLE_OPTIMIZER = frozenset({"self", "__class__", "params", "release_gradients", "offload"})


def group_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a constructor was told that a parameter group may say otherwise.

    Args:
        arguments: ``locals()`` of the constructor, taken first. Its signature is the one table of options, so none
            can be accepted and then forgotten.
    """
    return {name: value for name, value in arguments.items() if name not in _OF_THE_WHOLE_OPTIMIZER}


def scalar(value: Any, name: str) -> float:
    """A number, or a tensor of one element.

    Raises:
        ValueError: a tensor of more.
        TypeError: anything else.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} as a tensor has one element, not {value.numel()}")
        return float(value.item())
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a number or a one-element tensor, not {type(value).__name__}")
    return float(value)


def check_flags(group: Mapping[str, Any]) -> None:
    """Refuse, by name, ways to compute a step that are not ours.

    Raises:
        ValueError: one of them is set.
    """
    for name, why in _REFUSED.items():
        if group.get(name):
            raise ValueError(f"{name}={group[name]} is not supported: {why}")
    if group.get("fused") is False:
        raise ValueError("fused=False is not supported: longshore always runs one fused pass; leave fused unset")


def check_not_negative(group: Mapping[str, Any], *names: str) -> None:
    """Raises ValueError or TypeError for the first option that is not a number of at least 0."""
    for name in names:
        value = scalar(group[name], name)
        if not value >= 0.0:
            raise ValueError(f"{name} must not be negative, and is {value}")


def betas_of(group: Mapping[str, Any]) -> tuple[float, float]:
    """The group's two decay rates.

    Raises:
        ValueError: not two, or one that is not at least 0 and below 1.
        TypeError: something that is not a number.
    """
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas is a pair, not {betas!r}")
    beta1, beta2 = (scalar(beta, f"betas[{index}]") for index, beta in enumerate(betas))
    for index, beta in enumerate((beta1, beta2)):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"betas[{index}] must be at least 0 and below 1, and is {beta}")
    return beta1, beta2

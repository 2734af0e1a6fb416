"""``deepspeed.utils``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from longshore.compat.absent import getter
from longshore.compat.deepspeed.accelerator import get_accelerator
from longshore.compat.deepspeed.runtime.dataloader import RepeatingLoader
from longshore.compat.deepspeed.utils import groups, logging, zero_to_fp32
from longshore.compat.deepspeed.utils.logging import log_dist, logger, set_log_level_from_string
from longshore.compat.leaves import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from longshore.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)


def safe_update_full_grad_vectorized(
    param_list: Iterable[Tensor], update_func: Callable[[Tensor, Any], Tensor]
) -> None:
    """Replace each parameter's gradient of this window by ``update_func(gradient, parameter)``; those that have none
    are left out. All ranks have to call."""
    for parameter in param_list:
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            safe_set_full_grad(parameter, update_func(gradient, parameter))


__all__ = [
    "RepeatingLoader",
    "get_accelerator",
    "get_z3_leaf_modules",
    "groups",
    "log_dist",
    "logger",
    "logging",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_log_level_from_string",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "zero_to_fp32",
]

__getattr__ = getter(__name__)

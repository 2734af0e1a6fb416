"""``deepspeed.runtime.zero.offload_config``: sections of a file as objects, and the names of places and states."""

from __future__ import annotations

from enum import Enum
from typing import Any


class OffloadDeviceEnum(str, Enum):
    """Where parameters or optimizer states may rest: values of ``device``; ``nvme`` is refused by ``initialize()``."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """Kinds of state for ``offload_states()``, for scripts that import the names; the engine refuses the call."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class _Section(dict[str, Any]):
    """A section of a file, to be put into one: ``initialize()`` checks its keys as those of a file."""

    def __init__(self, **keys: Any) -> None:
        super().__init__({"device": "none", **keys})

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"this {type(self).__name__} has no {name}; give it where it is made", name=name)
        return self[name]


class DeepSpeedZeroOffloadParamConfig(_Section):
    """``zero_optimization.offload_param``."""


class DeepSpeedZeroOffloadOptimizerConfig(_Section):
    """``zero_optimization.offload_optimizer``."""

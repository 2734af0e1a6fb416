"""Dtypes of the model and of what goes in."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longshore.engine.config import Config

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """Dtypes to cast to.

    Attributes:
        parameters: dtype of floating parameters; None: as they are.
        autocast: dtype of ``torch.autocast`` around forward; None: no autocast.
        inputs: dtype of floating inputs of forward; None: as they are.
        device_type: ``cuda`` or ``cpu``.
    """

    parameters: torch.dtype | None
    autocast: torch.dtype | None
    inputs: torch.dtype | None
    device_type: str

    @classmethod
    def of(cls, config: Config, device: torch.device) -> Precision:
        parameters = DTYPES[config.dtype] if config.dtype is not None else None
        autocast = DTYPES[config.autocast] if config.autocast is not None else None
        return cls(parameters, autocast, parameters if config.cast_inputs else None, device.type)

    def convert(self, module: nn.Module) -> None:
        """Cast the parameters, which stay the same objects; buffers keep the dtype that they have."""
        if self.parameters is not None:
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(self.parameters)

    def entered(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.autocast)

    def cast(self, value: Any) -> Any:
        """Floating tensors inside lists, tuples and dictionaries in the dtype of inputs."""
        return value if self.inputs is None else _cast(value, self.inputs)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(entry, dtype) for entry in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(entry, dtype) for entry in value)
    if type(value) is dict:
        return {key: _cast(entry, dtype) for key, entry in value.items()}
    return value

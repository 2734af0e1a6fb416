"""Dtypes by their names in a configuration, and the cast of a model's inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Convert floating tensors inside lists, tuples and dictionaries to ``dtype``."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast(entry, dtype) for entry in value))
    if isinstance(value, (list, tuple)):
        return type(value)(cast(entry, dtype) for entry in value)
    if type(value) is dict:
        return {key: cast(entry, dtype) for key, entry in value.items()}
    return value

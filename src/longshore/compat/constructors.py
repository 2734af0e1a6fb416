"""torch's constructors under the names by which programs reach into ``deepspeed.runtime.zero.partition_parameters``.

DeepSpeed's ``zero.Init`` replaces torch's constructors while a model is made, so that tensors get its dtype and device,
and transformers replaces the replacement around it. longshore's ``zero.Init`` leaves torch's constructors alone: here
the names exist, and replacing them changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

ORIGINALS = {
    f"_orig_torch_{name}": getattr(torch, name)
    for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn")
}
"""torch's own functions, by the names that DeepSpeed keeps them under."""


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor],
    target_fp_dtype: torch.dtype,
    target_device: torch.device | str | None = None,
) -> Callable[..., torch.Tensor]:
    """Return a constructor that makes floating tensors in this dtype, and others in theirs, on this device.

    Args:
        fn: one of torch's constructors.
        target_fp_dtype: dtype of tensors that would be floating.
        target_device: device unless a call names one; None: torch's default.
    """

    @wraps(fn)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if target_device is not None and kwargs.get("device") is None:
            kwargs["device"] = target_device
        tensor = fn(*args, **kwargs)
        return tensor.to(target_fp_dtype) if tensor.is_floating_point() else tensor

    return made

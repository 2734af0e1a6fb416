"""The optimizer's record of each parameter, and what makes one acceptable."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from longshore.errors import GradientError, ParameterError
from longshore.kernels import SUPPORTED_DTYPES


class ParameterRecord:
    """What the optimizer knows of one parameter besides its pages."""

    def __init__(self, index: int, name: str, parameter: Tensor) -> None:
        # Fixed.
        self.index = index
        self.name = name
        self.parameter = parameter
        self.device = parameter.device
        self.dtype = parameter.dtype
        self.shape = parameter.shape
        # Change with each step.
        self.step = 0
        """Applied steps; the truth for this parameter alone (law 3)."""
        self.has_moments = False
        self.has_master = False
        self.published: tuple[int, int] | None = None
        """Version and address as this optimizer left them; None: not by us."""

    @property
    def changed(self) -> bool:
        """Whether somebody else may have written the parameter since it was published (law 10)."""
        return self.published != (self.parameter._version, self.parameter.data_ptr())

    def mark_published(self) -> None:
        self.published = (self.parameter._version, self.parameter.data_ptr())

    def values(self) -> Tensor:
        """The parameter's elements in logical order, flat and contiguous: a view where it can be."""
        return self.parameter.detach().reshape(-1)

    def check(self) -> None:
        """The parameter is still the one that was laid out.

        Raises:
            ParameterError: its device, dtype or shape changed.
        """
        parameter = self.parameter
        found = (parameter.device, parameter.dtype, parameter.shape)
        if found != (self.device, self.dtype, self.shape):
            raise ParameterError(
                f"parameter {self.name} was {self.dtype} {list(self.shape)} on {self.device} when the optimizer was "
                f"built and is {parameter.dtype} {list(parameter.shape)} on {parameter.device} now; "
                "build the optimizer after moving or converting the model"
            )

    def check_gradient(self, gradient: Tensor, same_dtype: bool) -> None:
        """The gradient is one that can be counted.

        Raises:
            GradientError: sparse, or of a device, shape or dtype that cannot be stepped.
        """
        if gradient.layout != torch.strided:
            raise GradientError(
                f"parameter {self.name} has a {gradient.layout} gradient; longshore steps dense gradients only "
                "(for nn.Embedding, use sparse=False)"
            )
        dtypes = (self.dtype,) if same_dtype else SUPPORTED_DTYPES
        if gradient.dtype not in dtypes:
            raise GradientError(
                f"parameter {self.name} ({self.dtype}) has a gradient of {gradient.dtype}; "
                f"it must be {' or '.join(str(dtype) for dtype in dtypes)}"
            )
        if gradient.device != self.device or gradient.shape != self.shape:
            raise GradientError(
                f"parameter {self.name} is {list(self.shape)} on {self.device}, and its gradient is "
                f"{list(gradient.shape)} on {gradient.device}"
            )


def check_parameter(parameter: Tensor, name: str, device: torch.device | None) -> None:
    """Refuse, before training starts, a parameter that cannot be stepped.

    Raises:
        ValueError: its kind, dtype, device or memory layout is not supported.
    """
    kind = type(parameter.detach())
    if kind is not Tensor:
        raise ValueError(
            f"parameter {name} is a {kind.__name__}; longshore.AdamW steps plain tensors on one device "
            "(sharded and quantized parameters are not supported)"
        )
    if parameter.is_inference():
        raise ValueError(f"parameter {name} was made in inference mode and cannot be trained; clone it outside")
    if device is not None and parameter.device != device:
        raise ValueError(
            f"parameter {name} is on {parameter.device} and earlier ones are on {device}; "
            "all parameters of one optimizer are on one device"
        )
    if parameter.layout != torch.strided:
        raise ValueError(f"parameter {name} is {parameter.layout}; longshore steps dense parameters only")
    if any(size > 1 and stride == 0 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)):
        raise ValueError(f"parameter {name} is expanded: several elements share memory; use .contiguous()")


def check_trainable(parameter: Tensor, name: str) -> None:
    """A parameter is about to be laid out: its dtype has to be one that the kernels step.

    Frozen parameters may be of any dtype (quantized base weights under an adapter).

    Raises:
        ValueError: any other dtype.
    """
    if parameter.dtype not in SUPPORTED_DTYPES:
        names = ", ".join(str(dtype) for dtype in SUPPORTED_DTYPES)
        raise ValueError(f"parameter {name} is {parameter.dtype}; longshore trains {names}")


def check_no_shared_memory(records: list[ParameterRecord]) -> None:
    """Two parameters must not be the same memory: each would have a master of its own.

    Raises:
        ValueError: naming the pair.
    """
    extents = sorted(
        (record.parameter.data_ptr(), record.parameter.numel() * record.parameter.element_size(), record.index)
        for record in records
        if record.parameter.numel() > 0 and record.parameter.is_contiguous()
    )
    for (start, num_bytes, first), (next_start, _, second) in pairwise(extents):
        if next_start < start + num_bytes:
            raise ValueError(
                f"parameters {records[first].name} and {records[second].name} are different tensors over the same "
                "memory; tie them by using one nn.Parameter in both places"
            )


def refuse_duplicates(params: list[Any]) -> None:
    """A parameter listed twice would be stepped twice.

    Raises:
        ValueError: naming both places.
    """
    seen: dict[int, int] = {}
    for position, entry in enumerate(params):
        parameter = entry[1] if isinstance(entry, tuple) else entry
        if id(parameter) in seen:
            raise ValueError(
                f"parameters {seen[id(parameter)]} and {position} of a group are the same tensor, which would be "
                "stepped twice; list it once"
            )
        seen[id(parameter)] = position

"""DeviceKernels for tests: on the CUDA device, or on the CPU in Triton's interpreter.

The interpreter runs the same functions with NumPy. What it shows is that our
order of operations, and where each rounds, gives the host kernel's bits: its
float32 operations and square root round to nearest even as a GPU's ``.rn``
instructions do, and its fma rounds once (checked here, as older ones did not).
That the compiler emits just those instructions is seen in the assembly
(``test_triton_rules.py``). What is left to a GPU is the launch itself.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from unittest import mock

import numpy
import pytest
import torch
from triton_interpreter import replaced_once

from longshore.kernels import DeviceKernels, TileSegment
from longshore.optim.rules.adagrad import AdagradRule

ON_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CUDA else "cpu")


@contextlib.contextmanager
def device_kernels() -> Iterator[DeviceKernels]:
    """Kernels for tensors on DEVICE; skips where Triton is missing or its interpreter cannot do it."""
    pytest.importorskip("triton")
    if ON_CUDA:
        yield DeviceKernels(DEVICE)
        return
    # Builds of torch for CUDA bring a Triton of their own: 3.4 with torch 2.8, 3.7 with torch 2.13.
    older = "the interpreter of older Tritons rounds an fma twice, or cannot view values in another dtype"
    pytest.importorskip("triton", minversion="3.9", reason=older)
    # Read when a kernel is decorated, and then no more: no other test sees it.
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        importlib.import_module("longshore.kernels.triton_rules")
    with replaced_once(), numpy.errstate(all="ignore"):  # infinities and NaN are no accidents here
        kernels = DeviceKernels(DEVICE)
        if not _rounds_once(kernels):
            pytest.skip("the fma of this Triton's interpreter rounds twice")
        yield kernels


def _rounds_once(kernels: DeviceKernels) -> bool:
    """Adagrad's sum is fma(g, g, sum): here g * g alone, rounded, would cancel the sum exactly."""
    g = 1.0 + 2.0**-12
    buffer = torch.tensor([[0.0], [-(1.0 + 2.0**-11)]], device=DEVICE)
    rule = AdagradRule(lr=0.0, lr_decay=0.0, eps=1.0, weight_decay=0.0, step=1)
    kernels.step_tile(buffer, buffer, [TileSegment(0, torch.tensor([g], device=DEVICE), None, 0)], [rule])
    return buffer[1].item() == 2.0**-24

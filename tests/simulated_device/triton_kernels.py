"""Triton's kernels on the simulated accelerator: its interpreter runs them, later, as work of the current stream.

A launch puts a function on the stream, which is delayed and counted as every other kernel. Kernels read and write the
device's own memory, by the addresses that tensors have: an access to anything else is the kernel's failure, which the
next wait of the host raises. As with CUDA, a launch keeps none of its tensors alive.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy
import torch
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction
from triton_interpreter import replaced_once

from longshore.kernels import device as device_kernels
from simulated_device.registration import NAME, native

_ONE_AT_A_TIME = threading.Lock()
"""The interpreter has one state for the whole process, and each stream has a thread."""
_TRITON: Any = interpreter._interpreter  # pyright: ignore[reportPrivateUsage]


class _Memory:
    """What the interpreter loads and stores with, on the memory of one device."""

    def __init__(self, device: torch.device) -> None:
        for_tensors, for_kernels, num_bytes = native().mappings(device.index)
        self._begin, self._end = numpy.uint64(for_tensors), numpy.uint64(for_tensors + num_bytes)
        self._for_kernels = numpy.uint64(for_kernels)

    def __getattr__(self, name: str) -> Any:
        return getattr(_TRITON, name)

    def load(self, at: Any, mask: Any, other: Any, dtype: Any) -> Any:
        return _TRITON.load(self._there(at, mask), mask, other, dtype)

    def store(self, at: Any, values: Any, mask: Any) -> Any:
        return _TRITON.store(self._there(at, mask), values, mask)

    def atomic_rmw(self, operation: Any, at: Any, values: Any, mask: Any, order: Any) -> Any:
        return _TRITON.atomic_rmw(operation, self._there(at, mask), values, mask, order)

    def _there(self, at: Any, mask: Any) -> Any:
        outside = mask & ((at < self._begin) | (at >= self._end))
        if outside.any():
            raise RuntimeError(f"a kernel accesses {int(at[outside][0]):#x}, which is not memory of its device")
        return numpy.where(mask, at - self._begin + self._for_kernels, at)


class _Address:
    """A tensor as a kernel gets it: where it begins, and its dtype."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self._address = tensor.data_ptr()

    def data_ptr(self) -> int:
        return self._address


class _Executor(GridExecutor):
    """Copies no arguments to the host and back."""

    def _init_args_hst(self, args_dev: Any, kwargs: Any) -> Any:
        return args_dev, kwargs

    def _restore_args_dev(self, args_dev: Any, args_hst: Any, kwargs: Any, kwargs_hst: Any) -> None:
        return


class _Kernel:
    def __init__(self, function: InterpretedFunction[Any], device: torch.device) -> None:
        self._function = function
        self._device = device

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        given = [_Address(each) if isinstance(each, Tensor) else each for each in arguments]
        execute = _Executor(self._function.rewrite(), self._function.arg_names, grid)
        memory = _Memory(self._device)

        def run() -> None:
            with (
                _ONE_AT_A_TIME,
                mock.patch.object(interpreter, "_interpreter", memory),
                numpy.errstate(all="ignore"),  # infinities and NaN are no accidents here
            ):
                execute(*given, **options)

        stream = torch.accelerator.current_stream(self._device)
        native().launch(self._device.index, stream.stream_id, run)


class _Rules:
    """The module ``triton_rules``, with kernels that are launched on one device."""

    def __init__(self, device: torch.device) -> None:
        # Read when a kernel is decorated, and then no more: no other test sees it.
        with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
            self._module = importlib.import_module("longshore.kernels.triton_rules")
        self._device = device

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return _Kernel(found, self._device) if isinstance(found, InterpretedFunction) else found


@contextlib.contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Context in which ``DeviceKernels`` are there for the simulated accelerator, as for a CUDA device with Triton."""
    found_once = (device_kernels.checksums_on, device_kernels.block_sums_on)
    rules_of = device_kernels._triton_rules  # pyright: ignore[reportPrivateUsage]

    def rules(device: torch.device) -> Any:
        return _Rules(device) if device.type == NAME else rules_of(device)

    with (
        mock.patch.object(device_kernels, "_triton_rules", rules),
        mock.patch.object(device_kernels, "_TRITON_DEVICES", {"cuda", NAME}),
        replaced_once(),
    ):
        for each in found_once:
            each.cache_clear()
        try:
            yield
        finally:
            for each in found_once:
                each.cache_clear()

"""``deepspeed.accelerator``: CUDA, or the CPU where there is none."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from longshore.compat.finder import attribute_error


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _most_resident_bytes() -> int:
    # The kernel updates the peak later than the current figure.
    return max(_resident_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _method(name: str, on_cpu: Callable[[], Any]) -> Callable[..., Any]:
    """A method that calls ``torch.cuda``'s function of that name, or ``on_cpu`` if there is no CUDA.

    Its argument is the number of the device; None: the current one.
    """

    def method(self: DeepSpeedAccelerator, device_index: int | None = None) -> Any:
        if not self._cuda:
            return on_cpu()
        return getattr(torch.cuda, name)(*([] if device_index is None else [device_index]))

    return method


class DeepSpeedAccelerator:
    """The kind of device that the run trains on: CUDA if there is any, otherwise the CPU.

    On the CPU, allocated memory is the process's resident memory, and nothing can be reset. The current device and the
    number of devices are the rank's number and the number of ranks on its machine, as in DeepSpeed.
    """

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available()

    def __getattr__(self, name: str) -> Any:
        raise attribute_error("accelerator", name)

    set_device = _method("set_device", lambda: None)
    current_device = _method("current_device", lambda: int(os.environ.get("LOCAL_RANK", "0")))
    device_count = _method("device_count", lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    synchronize = _method("synchronize", lambda: None)
    initial_seed = _method("initial_seed", torch.initial_seed)
    get_rng_state = _method("get_rng_state", torch.get_rng_state)
    is_bf16_supported = _method("is_bf16_supported", lambda: True)
    memory_allocated = _method("memory_allocated", _resident_bytes)
    memory_reserved = _method("memory_reserved", _resident_bytes)
    max_memory_allocated = _method("max_memory_allocated", _most_resident_bytes)
    max_memory_reserved = _method("max_memory_reserved", _most_resident_bytes)
    empty_cache = _method("empty_cache", lambda: None)
    reset_peak_memory_stats = reset_max_memory_allocated = _method("reset_peak_memory_stats", lambda: None)

    def is_available(self) -> bool:
        return True

    def device_name(self, device_index: int | None = None) -> str:
        """``"cuda"``, or ``"cuda:1"``; ``"cpu"`` whatever the number."""
        if not self._cuda:
            return "cpu"
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def current_device_name(self) -> str:
        """The current device's name, as ``Tensor.to()`` takes it."""
        return self.device_name(self.current_device())

    def communication_backend_name(self) -> str:
        return "nccl" if self._cuda else "gloo"

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.device_name()

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """Pin the tensor; returns it unchanged on the CPU, where nothing is copied to a device."""
        return tensor.pin_memory() if self._cuda else tensor

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        if not self._cuda:
            torch.set_rng_state(new_state)
        else:
            torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Dtypes that a model can train in."""
        return [torch.float32, torch.float16] + [torch.bfloat16] * self.is_bf16_supported()

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of memory of the device, or on the CPU of the machine."""
        if self._cuda:
            return torch.cuda.get_device_properties(self.device(device_index)).total_memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@cache
def get_accelerator() -> DeepSpeedAccelerator:
    """The accelerator of this process; the same object at every call."""
    return DeepSpeedAccelerator()

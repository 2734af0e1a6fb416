"""``deepspeed.accelerator``: CUDA, or the CPU where there is none."""

from __future__ import annotations

import os
import resource
from functools import cache
from typing import Any

import torch
from torch import Tensor

from longshore.compat.finder import attribute_error

_ONE_KIB = 1024


class DeepSpeedAccelerator:
    """The kind of device that the run trains on: CUDA if there is any, otherwise the CPU."""

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available()

    def __getattr__(self, name: str) -> Any:
        raise attribute_error("accelerator", name)

    # -- devices --------------------------------------------------------------

    def is_available(self) -> bool:
        return True

    def device_name(self, device_index: int | None = None) -> str:
        """``"cuda"``, or ``"cuda:1"``; ``"cpu"`` whatever the number."""
        if not self._cuda:
            return "cpu"
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def set_device(self, device_index: int) -> None:
        """Choose the CUDA device; does nothing on the CPU."""
        if self._cuda:
            torch.cuda.set_device(device_index)

    def current_device(self) -> int:
        """The device's number; on the CPU the rank's number on its machine, as in DeepSpeed."""
        return torch.cuda.current_device() if self._cuda else int(os.environ.get("LOCAL_RANK", "0"))

    def current_device_name(self) -> str:
        """The current device's name, as ``Tensor.to()`` takes it."""
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        return torch.cuda.device_count() if self._cuda else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def synchronize(self, device_index: int | None = None) -> None:
        if self._cuda:
            torch.cuda.synchronize(device_index)

    def communication_backend_name(self) -> str:
        return "nccl" if self._cuda else "gloo"

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.device_name()

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """Pin the tensor; returns it unchanged on the CPU, where nothing is copied to a device."""
        return tensor.pin_memory() if self._cuda else tensor

    # -- random numbers -------------------------------------------------------

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        return torch.cuda.initial_seed() if self._cuda else torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        if not self._cuda:
            return torch.get_rng_state()
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        if not self._cuda:
            torch.set_rng_state(new_state)
        else:
            torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

    # -- numbers --------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if self._cuda else True

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Dtypes that a model can train in."""
        return [torch.float32, torch.float16] + [torch.bfloat16] * self.is_bf16_supported()

    # -- memory ---------------------------------------------------------------

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes allocated; on the CPU, bytes resident in the process."""
        if self._cuda:
            return torch.cuda.memory_allocated(device_index)
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Peak of :meth:`memory_allocated`, in bytes."""
        if self._cuda:
            return torch.cuda.max_memory_allocated(device_index)
        # The kernel updates the peak later than the current figure.
        return max(self.memory_allocated(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _ONE_KIB)

    def memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_reserved(device_index) if self._cuda else self.memory_allocated()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_reserved(device_index) if self._cuda else self.max_memory_allocated()

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of memory of the device, or on the CPU of the machine."""
        if self._cuda:
            return torch.cuda.get_device_properties(self.device(device_index)).total_memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def empty_cache(self) -> None:
        if self._cuda:
            torch.cuda.empty_cache()

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Reset the peak; does nothing on the CPU, whose peak the system counts."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_peak_memory_stats


@cache
def get_accelerator() -> DeepSpeedAccelerator:
    """The accelerator of this process; the same object at every call."""
    return DeepSpeedAccelerator()

"""``torch.sim``: what ``torch.cuda`` has, for the simulated accelerator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from simulated_device.registration import NAME, native

_NATIVE = native()
_Device = torch.device | str | int | None


def _index(device: _Device = None) -> int:
    if isinstance(device, int) and device >= 0:
        return device
    if device is None or isinstance(device, int):
        return torch.accelerator.current_device_index()
    device = torch.device(device)
    if device.type != NAME:
        raise ValueError(f"expected a {NAME} device, not {device}")
    return torch.accelerator.current_device_index() if device.index is None else device.index


# -- devices ----------------------------------------------------------------------------------------------------------


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    return


def device_count() -> int:
    return _NATIVE.device_count()


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: _Device) -> None:
    torch.accelerator.set_device_index(_index(device))


def synchronize(device: _Device = None) -> None:
    torch.accelerator.synchronize(_index(device))


def can_device_access_peer(device: _Device, peer: _Device) -> bool:
    return True


def get_device_name(device: _Device = None) -> str:
    return "simulated"


def get_device_capability(device: _Device = None) -> tuple[int, int]:
    return 9, 0


def get_device_properties(device: _Device = None) -> SimpleNamespace:
    return SimpleNamespace(
        name=get_device_name(device),
        total_memory=mem_get_info(device)[1],
        major=9,
        minor=0,
        multi_processor_count=1,
        pci_domain_id=0,
        pci_bus_id=_index(device),
        pci_device_id=0,
    )


class device:
    """Context in which a device is current; None or a negative number changes nothing."""

    def __init__(self, device: _Device) -> None:
        self._index = None if device is None or device == -1 else _index(device)
        self._before = 0

    def __enter__(self) -> None:
        self._before = current_device()
        if self._index is not None:
            set_device(self._index)

    def __exit__(self, *_: object) -> None:
        set_device(self._before)


# -- streams ----------------------------------------------------------------------------------------------------------


class Stream(torch.Stream):
    def __new__(cls, device: _Device = None, priority: int = 0) -> Any:
        return super().__new__(cls, device=torch.device(NAME, _index(device)), priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        return super().__new__(cls, device=NAME, enable_timing=enable_timing)


def current_stream(device: _Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device(NAME, _index(device)))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Context in which a stream is current, and its device."""
    if stream is None:
        yield
        return
    with device(stream.device):
        before = current_stream()
        set_stream(stream)
        try:
            yield
        finally:
            set_stream(before)


capturing = False
"""What :func:`is_current_stream_capturing` says. Nothing is captured here: tests see what is refused."""


def is_current_stream_capturing() -> bool:
    return capturing


def _sleep(cycles: int) -> None:
    """Let the current stream sleep, as for so many cycles of a device with 2 GHz."""
    _NATIVE.sleep_us(cycles // 2000)


# -- memory -----------------------------------------------------------------------------------------------------------


def memory_allocated(device: _Device = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: _Device = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: _Device = None) -> int:
    return torch.accelerator.memory_reserved(_index(device))


max_memory_reserved = memory_reserved


def reset_peak_memory_stats(device: _Device = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_index(device))


# -- random numbers ---------------------------------------------------------------------------------------------------


def _generator(device: _Device = None) -> torch.Generator:
    return _NATIVE.default_generator(_index(device))


_initialized = True
"""torch.utils.checkpoint keeps the random states of devices that are."""


def get_rng_state(device: _Device = NAME) -> Tensor:
    return _generator(device).get_state()


def set_rng_state(state: Tensor, device: _Device = NAME) -> None:
    _generator(device).set_state(state)


def manual_seed(seed: int) -> None:
    _generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def initial_seed() -> int:
    return _generator().initial_seed()


# -- what training uses -----------------------------------------------------------------------------------------------


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True

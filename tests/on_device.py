"""What ``gpu`` tests share: they run on a GPU, or with ``--simulated-device`` on the simulated accelerator."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch


def compiles_triton() -> bool:
    """Whether Triton compiles kernels for the accelerator; on the simulated one, its interpreter runs them, in tests
    that ask for it and in their process alone."""
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type == "cuda"


needs_triton = pytest.mark.triton
NONE = pytest.param("none", marks=needs_triton)
"""``Offload(device="none")``, whose state stays on the device."""


def device_type() -> str:
    """The type of the accelerator that a ``gpu`` test runs on."""
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found.type


def current_device() -> torch.device:
    """The device that is current, with its index."""
    return torch.device(device_type(), torch.accelerator.current_device_index())


def keep_busy(cycles: int) -> None:
    """Let the current stream sleep for so many cycles of the device, some 2 of a nanosecond."""
    torch.get_device_module()._sleep(cycles)


@contextlib.contextmanager
def busy_stream(cycles: int) -> Iterator[None]:
    """Keep the current stream busy until the end of the block; on a GPU for so many cycles, however long that is."""
    if device_type() != "sim":
        keep_busy(cycles)
        yield
        return
    from simulated_device import native

    stream, over = torch.accelerator.current_stream(), threading.Event()
    native().call_on_stream(stream.device.index, stream.stream_id, over.wait)
    try:
        yield
    finally:
        over.set()

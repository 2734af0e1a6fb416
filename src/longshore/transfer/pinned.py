"""Pinned host memory of the size that was asked for: torch's own allocator rounds up to a power of two."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

from longshore.transfer.private import private_block


def _runtime() -> Any:
    return torch.cuda.cudart()  # pyright takes it for None where torch has no CUDA


class _PinnedBlock(mmap.mmap):
    """Anonymous memory that CUDA's copy engines can access; it is unpinned when the last tensor over it is freed."""

    address = 0
    """Address of the memory; 0: it is not pinned."""

    def __del__(self) -> None:
        if self.address:
            with contextlib.suppress(Exception):  # at the end of the program CUDA may have gone first
                _runtime().cudaHostUnregister(self.address)


def allocate_pinned(num_bytes: int) -> Tensor:
    """Allocate pinned memory of zeros, uint8 ``[num_bytes]``, rounded up to pages of the operating system alone.

    torch's allocator, which rounds 1.1 GiB up to 2 GiB, is used where the driver cannot pin memory that exists already,
    and for accelerators without CUDA's (or ROCm's) interface for that.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    block = private_block(_PinnedBlock, num_bytes, wiped=False)  # with huge pages there are fewer to pin
    memory = torch.frombuffer(block, dtype=torch.uint8)
    with contextlib.suppress(RuntimeError, AssertionError):  # the latter where torch has no CUDA
        torch.cuda.check_error(int(_runtime().cudaHostRegister(memory.data_ptr(), num_bytes, 0)))
        block.address = memory.data_ptr()
        return memory
    return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def part_of(memory: Tensor, begin: int, num_bytes: int) -> Tensor:
    """Return ``num_bytes`` bytes of ``memory``, uint8, that are a storage of their own for torch.

    Tools that save models take tensors of one storage for one tensor, or save all of it for each of them.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(memory.numpy()[begin : begin + num_bytes], dtype=torch.uint8)  # which keeps the memory


class PinnedPool:
    """Pinned memory that is given again once the last tensor over it is freed; any thread may free it."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return a tensor in pinned memory with the shape, dtype and, if it is dense, the strides of ``tensor``."""
        strides = tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
        num_bytes = tensor.numel() * tensor.element_size()
        with torch.inference_mode(False), torch.no_grad():
            made = torch.empty(0, dtype=tensor.dtype, device="cpu")
            if num_bytes == 0:
                return made.view(tensor.shape)
            # Not a view of the memory: it may become a parameter's ``.grad``.
            return made.set_(self._lend(num_bytes).untyped_storage(), 0, tensor.shape, strides)  # pyright: ignore

    def _lend(self, num_bytes: int) -> Tensor:
        free = self._free.setdefault(num_bytes, [])
        try:
            memory = free.pop()
        except IndexError:
            memory = allocate_pinned(num_bytes)
        lent = (ctypes.c_ubyte * num_bytes).from_address(memory.data_ptr())
        weakref.finalize(lent, free.append, memory).atexit = False
        return torch.frombuffer(lent, dtype=torch.uint8)  # which keeps the object until nothing has its memory

"""Host memory of this process alone, pinned or not: a process that it forks finds zeros there, or nothing."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

_SMALL_BYTES = 2 << 20
_MADV_WIPEONFORK, _MADV_KEEPONFORK = 18, 19
"""Linux's numbers, which Python's module does not have."""
_blocks = weakref.WeakSet[mmap.mmap]()
"""All blocks whose contents a forked process does not get."""

Block = TypeVar("Block", bound=mmap.mmap)


def _huge_page_bytes() -> int:
    try:
        return int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return _SMALL_BYTES


_HUGE_PAGE_BYTES = _huge_page_bytes()
"""2 MiB where pages have 4 KiB; 512 MiB where they have 64 KiB, as on some machines with ARM's CPUs."""


def private_block(kind: type[Block], num_bytes: int, wiped: bool = True) -> Block:
    """Map zeros that take memory only as they are touched; ``kind`` is the class of the mapping.

    ``wiped``: whether a forked process finds zeros there. Otherwise it has no such memory, and ends where it touches
    it, as is right for memory that scripts may have tensors of: they must not read zeros for values.

    Huge pages are requested: with 4 KiB pages, address translation takes a good part of a step's time. A forked process
    (a worker of a data loader) does not get the contents. Otherwise the first step after each fork would copy every
    page, and leave the huge ones to the other process; and a page that a copy engine reads would move.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return kind(-1, num_bytes)
    # The default is shared memory: forked data loaders could write it, and Linux gives it no huge pages.
    block = kind(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages is slower, but not wrong
            block.madvise(mmap.MADV_HUGEPAGE)
    if hasattr(mmap, "MADV_DONTFORK"):
        try:
            block.madvise(_MADV_WIPEONFORK if wiped else mmap.MADV_DONTFORK)
        except OSError:  # Linux before 4.14, where a forked process has no memory there
            block.madvise(mmap.MADV_DONTFORK)
        _blocks.add(block)
    return block


def copy_on_fork(tensors: Iterable[Tensor]) -> None:
    """Let processes that are forked from now on get the contents of the blocks of these tensors, as of other memory."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    for block in list(_blocks):
        begin = ctypes.addressof(ctypes.c_char.from_buffer(block))
        if any(begin <= address < begin + len(block) for address in addresses):
            _blocks.discard(block)
            for advice in (_MADV_KEEPONFORK, mmap.MADV_DOFORK):
                with contextlib.suppress(OSError):
                    block.madvise(advice)


class _Slabs:
    """Memory with room for huge pages, of which tensors that are smaller than one are parts. A slab is freed with the
    last of them; before, a part that is free is handed out again for one of its size."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: Callable[[], mmap.mmap | None] = lambda: None
        self._end = self._limit = 0
        """Where the part that was cut last ends in the newest slab, and where the last huge page ends that is whole."""
        self._free: dict[int, deque[tuple[weakref.ref[mmap.mmap], int]]] = {}
        """Parts by their size; whichever thread frees one appends it."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Return zeros, uint8 ``[num_bytes]``."""
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            free = self._free.setdefault(size, deque())
            while free:
                slab, begin = free.pop()
                if (block := slab()) is not None:
                    return self._part(block, begin, size)[:num_bytes].zero_()
            block = self._newest()
            if block is None or self._end + size > self._limit:
                block = private_block(mmap.mmap, 2 * _HUGE_PAGE_BYTES)  # one is whole, wherever the block begins
                self._newest = weakref.ref(block)
                self._end = -ctypes.addressof(ctypes.c_char.from_buffer(block)) % _HUGE_PAGE_BYTES
                self._limit = self._end + (1 + (self._end == 0)) * _HUGE_PAGE_BYTES
            begin, self._end = self._end, self._end + size
            return self._part(block, begin, size)[:num_bytes]

    def forked(self) -> None:
        self._lock = threading.Lock()  # another thread may have had the former one

    def _part(self, block: mmap.mmap, begin: int, size: int) -> Tensor:
        lent = (ctypes.c_ubyte * size).from_buffer(block, begin)
        weakref.finalize(lent, self._free[size].append, (weakref.ref(block), begin)).atexit = False
        return torch.frombuffer(lent, dtype=torch.uint8)  # which keeps the object, and that the block


_slabs = _Slabs()
os.register_at_fork(after_in_child=_slabs.forked)


def allocate_private(num_bytes: int) -> Tensor:
    """Allocate zeros in host memory, uint8 ``[num_bytes]``; see :func:`private_block`, for which small ones are too
    small."""
    if num_bytes < _SMALL_BYTES:
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")  # whatever the default device
    if num_bytes < _HUGE_PAGE_BYTES:
        return _slabs.allocate(num_bytes)
    return torch.frombuffer(private_block(mmap.mmap, num_bytes), dtype=torch.uint8)


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

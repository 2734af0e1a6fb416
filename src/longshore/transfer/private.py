"""Host memory of this process alone: a process that it forks finds zeros there, or nothing."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor

_HUGE_PAGE_BYTES = 2 << 20
_MADV_WIPEONFORK, _MADV_KEEPONFORK = 18, 19
"""Linux's numbers, which Python's module does not have."""
_blocks = weakref.WeakSet[mmap.mmap]()
"""All blocks whose contents a forked process does not get."""

Block = TypeVar("Block", bound=mmap.mmap)


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


def allocate_private(num_bytes: int) -> Tensor:
    """Allocate zeros in host memory, uint8 ``[num_bytes]``; see :func:`private_block`, for which small ones are too
    small."""
    if num_bytes < _HUGE_PAGE_BYTES:
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")  # whatever the default device
    return torch.frombuffer(private_block(mmap.mmap, num_bytes), dtype=torch.uint8)

"""The inputs of checkpointed functions, kept in host memory between forward and backward.

What comes back has the values, the strides and the alignment of what went, so
that the recomputation runs the same kernels on it and gives the same bits.
"""

from __future__ import annotations

from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_ALIGNMENT_BYTES = 256
"""Matrix libraries choose kernels by how well their operands are aligned, up to this."""


class HostInput:
    """One tensor's copy in host memory: pinned when it came from a CUDA device.

    Args:
        tensor: copied, and not kept. A dense tensor is copied as it lies in
            memory, an expanded one without its repetitions, and one with gaps
            without them; a sparse tensor or a subclass as torch copies it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        self._size, self._stride = tensor.size(), None
        with torch.no_grad():
            plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
            if not plain or tensor.is_nested:
                self._host = tensor.detach().to("cpu", copy=True)
                return
            self._stride = tensor.stride()
            phase_bytes = tensor.data_ptr() % _ALIGNMENT_BYTES
            self._phase = phase_bytes // tensor.element_size()
            self._extent = _extent(self._size, self._stride)
            self._has_gaps = self._extent > tensor.numel() and _has_no_overlap(self._size, self._stride)
            self._host = _to_host(tensor if self._has_gaps else _range_of(tensor, self._extent))

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        return self._host.numel() * self._host.element_size()

    def restore(self) -> Tensor:
        """A new tensor on the device that the input came from, equal to it bit for bit."""
        with torch.no_grad():
            if self._stride is None:
                return self._host.to(self._device, copy=True)
            # The copy is enqueued on the current stream. Whoever may read the input there is ordered
            # after the stream that was current when it was saved, and so after the copy to the host.
            memory = torch.empty(self._phase + self._extent, dtype=self._host.dtype, device=self._device)
            restored = memory.as_strided(self._size, self._stride, self._phase)
            target = restored if self._has_gaps else memory[self._phase :]
            target.copy_(self._host, non_blocking=self._host.is_pinned())
            return restored


def _extent(size: torch.Size, stride: tuple[int, ...]) -> int:
    """Elements from the first to the last in memory."""
    if 0 in size:
        return 0
    return 1 + sum((count - 1) * step for count, step in zip(size, stride, strict=True))


def _has_no_overlap(size: torch.Size, stride: tuple[int, ...]) -> bool:
    """Whether surely no two elements share memory."""
    end = 1
    for step, count in sorted((step, count) for count, step in zip(size, stride, strict=True) if count > 1):
        if step < end:
            return False
        end += (count - 1) * step
    return True


def _range_of(tensor: Tensor, extent: int) -> Tensor:
    return tensor.detach().as_strided((extent,), (1,), tensor.storage_offset())


def _to_host(tensor: Tensor) -> Tensor:
    pinned = tensor.device.type == "cuda"
    host = torch.empty(tensor.size(), dtype=tensor.dtype, device="cpu", pin_memory=pinned)
    # torch's pinned allocator does not hand the block out again before this copy is done.
    return host.copy_(tensor.detach(), non_blocking=pinned)


_held: WeakSet[HostInput] = WeakSet()


def save_on_host() -> saved_tensors_hooks:
    """A context inside of which what autograd saves goes to host memory. CPU tensors are copied too, so that
    a CPU run does what a CUDA run does."""
    return saved_tensors_hooks(_pack, _unpack)


def _pack(tensor: Tensor) -> HostInput:
    packed = HostInput(tensor)
    _held.add(packed)
    return packed


def _unpack(packed: HostInput) -> Tensor:
    return packed.restore()


def held_host_bytes() -> int:
    """Bytes of host memory that saved inputs hold at the moment, until their backward or the end of their graph."""
    return sum(packed.host_bytes for packed in list(_held))

"""Activation checkpointing: a call that is computed again in backward, and its inputs in host memory meanwhile.

Inputs are copied to the host in forward, and fetched ahead of their backward.

Both copies run on streams of their own. Memory of the host is pinned once, and used again for inputs of its size.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from longshore.transfer import Copy, DeviceCopy, DeviceCopyStream, DeviceFetch, allocate_pinned

_ALIGNMENT_BYTES = 256
"""The largest alignment of operands that matrix libraries consider when they choose kernels."""

_IN_FLIGHT_BYTES = 1 << 28
"""Bytes of inputs that may be on their way to the host before forward waits; they are in device memory until then."""


class PinnedBlocks:
    """Pinned memory that is used again, as pinning takes milliseconds: never more than was in use at once, but for the
    part by which blocks are larger than inputs.

    Attributes:
        allocated_bytes: of all blocks, free or not.
    """

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self._most_bytes = self._free_bytes = 0
        self._lock = threading.Lock()
        self._free: deque[tuple[Tensor, list[Copy]]] = deque()
        """Blocks, with the copies that may still read or write them; those that were given back first come first."""
        self._given_back: deque[tuple[Tensor, list[Copy]]] = deque()

    def give_back(self, block: Tensor, copies: list[Copy]) -> None:
        """Take a block back, from whatever thread frees an input, also while another one is in :meth:`take`."""
        self._given_back.append((block, copies))
        for copy in copies:
            if isinstance(copy, DeviceCopy):
                copy.let_go()  # or the input stayed on the device until the block is used again

    def take(self, num_bytes: int) -> Tensor:
        """Return memory that nothing reads or writes any more: uint8 ``[at least num_bytes]``."""
        with self._lock:
            while self._given_back:
                self._free.append(self._given_back.popleft())
                self._free_bytes += self._free[-1][0].nbytes
            for index, free in enumerate(self._free):
                if num_bytes <= free[0].nbytes <= num_bytes + num_bytes // 8:
                    del self._free[index]
                    return self._finished(free)
            self._most_bytes = max(self._most_bytes, self.allocated_bytes - self._free_bytes + num_bytes)
            while self._free and self.allocated_bytes + num_bytes > self._most_bytes:
                self.allocated_bytes -= self._finished(self._free.popleft()).nbytes
            block = allocate_pinned(num_bytes)
            self.allocated_bytes += num_bytes
            return block

    def _finished(self, free: tuple[Tensor, list[Copy]]) -> Tensor:
        block, copies = free
        self._free_bytes -= block.nbytes
        for copy in copies:
            copy.wait()
        return block


_blocks = PinnedBlocks()


@functools.cache
def _streams(device: torch.device) -> tuple[DeviceCopyStream, DeviceCopyStream]:
    return DeviceCopyStream(device, _IN_FLIGHT_BYTES), DeviceCopyStream(device)


class HostInput:
    """A copy of one tensor in host memory, which is pinned if the tensor was on an accelerator.

    Args:
        tensor: the tensor to copy; it is kept alive until it is copied. A dense tensor keeps its memory layout, but
            neither the repetitions of an expanded tensor nor gaps are copied; torch copies a sparse tensor or a
            subclass.
        call: the call that it is an input of.
    """

    def __init__(self, tensor: Tensor, call: InputsOfCall | None = None) -> None:
        self._device = tensor.device
        self._size, self._stride = tensor.size(), None
        self._call = call
        self._copies: list[Copy] = []
        """Those that write and read the memory of the host."""
        self._fetch: DeviceFetch | None = None
        """The copy to the device that has begun and that nobody has asked for."""
        self._written: Tensor | None = None
        """Counts writes to an input whose copy may still be under way; one that is copied at once may be written."""
        self._version = 0
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        with torch.no_grad():
            as_is = plain and not tensor.is_nested
            self._host = self._memory_of(tensor) if as_is else tensor.detach().to("cpu", copy=True)
        _alive.add(self)

    def _memory_of(self, tensor: Tensor) -> Tensor:
        self._stride = tensor.stride()
        self._phase = tensor.data_ptr() % _ALIGNMENT_BYTES // tensor.element_size()
        spans = ((count - 1) * step for count, step in zip(self._size, self._stride, strict=True))
        self._extent = 0 if tensor.numel() == 0 else 1 + sum(spans)  # elements from the first to the last in memory
        self._has_gaps = self._extent > tensor.numel() and _has_no_overlap(self._size, self._stride)
        source = tensor.detach()
        if not self._has_gaps:
            source = source.as_strided((self._extent,), (1,), tensor.storage_offset())
        if tensor.device.type == "cpu" or source.numel() == 0:
            return torch.empty(source.size(), dtype=tensor.dtype, device="cpu").copy_(source)
        num_bytes = source.numel() * source.element_size()
        block = _blocks.take(num_bytes)
        finalizer = weakref.finalize(self, _blocks.give_back, block, self._copies)
        finalizer.atexit = False
        host = block[:num_bytes].view(tensor.dtype).view(source.size())
        to_host, _ = _streams(tensor.device)
        self._copies[:] = [to_host.copy(source, host, to_host.mark())]
        if not tensor.is_inference():
            self._written = _written(tensor)
            self._version = self._written._version
        return host

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        return self._host.numel() * self._host.element_size()

    def fetch(self) -> None:
        """Begin to bring it back, if it is in pinned memory and is not on its way."""
        if self._copies and self._fetch is None:
            to_host, to_device = _streams(self._device)
            restored, target = self._memory_on_device()
            self._fetch = to_device.fetch(self._host, target, restored, self._copies[0])
            self._copies[1:] = [self._fetch.end()]  # the block outlives this input, and must not keep device memory
            to_host.forget_finished()

    def restore(self) -> Tensor:
        """Return a new tensor on the device that the input came from, equal to it bit for bit. Work that is enqueued on
        the current stream from now on sees it.

        Raises:
            RuntimeError: the input, of an accelerator, was written after it was saved, as autograd raises.
        """
        if self._written is not None and self._written._version != self._version:
            raise RuntimeError(
                "an input of a call that backward computes again has been modified by an inplace operation: "
                f"{self._host.dtype} {list(self._size)} is at version {self._written._version}; expected version "
                f"{self._version} instead"
            )
        with torch.no_grad():
            if self._stride is None:
                return self._host.to(self._device, copy=True)
            self.fetch()
            if self._call is not None:
                self._call.fetch_before()
            if self._fetch is None:
                restored, target = self._memory_on_device()
                target.copy_(self._host)
                return restored
            fetch, self._fetch = self._fetch, None
            return fetch.take()

    def _memory_on_device(self) -> tuple[Tensor, Tensor]:
        """Return new memory as a tensor like the input, and the target of the host's copy."""
        assert self._stride is not None
        memory = torch.empty(self._phase + self._extent, dtype=self._host.dtype, device=self._device)
        restored = memory.as_strided(self._size, self._stride, self._phase)
        return restored, restored if self._has_gaps else memory[self._phase :]


class InputsOfCall:
    """The inputs of one call of a checkpointed function. Backward comes to the call that was saved before it next, so
    the inputs of that one are fetched when those of this one are needed."""

    def __init__(self) -> None:
        self._inputs: list[weakref.ref[HostInput]] = []
        self._before = _latest.call
        _latest.call = weakref.ref(self)

    def save(self, tensor: Tensor) -> HostInput:
        saved = HostInput(tensor, self)
        self._inputs.append(weakref.ref(saved))
        return saved

    def fetch_before(self) -> None:
        """Begin to fetch the inputs of the call before, if a graph still has them."""
        before = None if self._before is None else self._before()
        for reference in [] if before is None else before._inputs:
            if (saved := reference()) is not None:
                with contextlib.suppress(torch.OutOfMemoryError):  # there is time, and there may be memory later
                    saved.fetch()


class _Latest(threading.local):
    call: weakref.ref[InputsOfCall] | None = None
    """The call of this thread that saved inputs last."""


_latest = _Latest()


def _written(tensor: Tensor) -> Tensor:
    """Return a tensor without memory whose version is that of ``tensor``, also later."""
    alias = tensor.detach()
    alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias


def _has_no_overlap(size: torch.Size, stride: tuple[int, ...]) -> bool:
    """Return True only if it is certain that no two elements share memory."""
    end = 1
    for step, count in sorted((step, count) for count, step in zip(size, stride, strict=True) if count > 1):
        if step < end:
            return False
        end += (count - 1) * step
    return True


_alive: weakref.WeakSet[HostInput] = weakref.WeakSet()


def held_host_bytes() -> int:
    """Return the bytes of host memory that saved inputs take now, until their backward or the end of their graph."""
    return sum(saved.host_bytes for saved in list(_alive))


# -- the call ----------------------------------------------------------------------


def compute_again(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], inputs_on_host: bool
) -> Any:
    """Call ``function(*args, **kwargs)``, and compute it again in backward instead of keeping its activations.

    ``inputs_on_host``: the tensors among the arguments are kept in host memory, unless the call is inside of another
    one, which computes it again itself.
    """
    inputs = _Inputs(args, kwargs)

    def run(*values: Any) -> Any:
        args, kwargs = inputs.of(values)
        former, _nesting.inside = _nesting.inside, True
        try:
            return function(*args, **kwargs)
        finally:
            _nesting.inside = former

    # CPU tensors are copied too, so that a CPU run does what a CUDA run does. Tensors that nested calls save, in
    # forward and in the recomputation, must reach the outer checkpoint's own hooks.
    on_host = inputs_on_host and not _nesting.inside
    with saved_tensors_hooks(InputsOfCall().save, HostInput.restore) if on_host else contextlib.nullcontext():
        # Keyword arguments are passed by position: torch saves only positional tensors with versions, like autograd.
        return torch.utils.checkpoint.checkpoint(run, *inputs.take_values(), use_reentrant=False)


class _Inputs:
    """The arguments of a call, and how they are made again of the values that torch keeps.

    A tensor is kept once, so that in the recomputation it is one tensor wherever it was one in the call, also inside of
    a container beside itself. Other arguments are kept as they are.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._given: tuple[Sequence[Any], Mapping[str, Any]] | None = (args, kwargs)
        """The arguments themselves, until the call has got them: kept longer, they would keep memory."""
        self._names, self._num_positional = tuple(kwargs), len(args)
        arguments = [*args, *kwargs.values()]
        tensors = {id(each): each for each in arguments if isinstance(each, Tensor)}
        place = {key: index for index, key in enumerate(tensors)}
        self._values: list[Any] = [*tensors.values()]
        self._places: list[int] = []
        """Of each argument among the values."""
        self._containers: dict[int, tuple[TreeSpec, dict[int, int]]] = {}
        """Values that are the leaves of a container: what it is, and which of its leaves are a value by themselves."""
        for each in arguments:
            if isinstance(each, Tensor):
                self._places.append(place[id(each)])
                continue
            leaves, spec = tree_flatten(each, is_leaf=lambda part: not isinstance(part, (tuple, list, dict)))
            shared = {index: place[id(leaf)] for index, leaf in enumerate(leaves) if id(leaf) in place}
            if shared:
                self._containers[len(self._values)] = spec, shared
                each = [None if index in shared else leaf for index, leaf in enumerate(leaves)]
            self._places.append(len(self._values))
            self._values.append(each)

    def take_values(self) -> list[Any]:
        """Return the values that torch is to keep; they are asked for once, so that nothing else keeps them."""
        values, self._values = self._values, []
        return values

    def of(self, values: Sequence[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments: the first time those of the call itself, then made again of ``values``."""
        if self._given is not None:
            given, self._given = self._given, None
            return given
        arguments = [self._argument(place, values) for place in self._places]
        return arguments[: self._num_positional], dict(zip(self._names, arguments[self._num_positional :], strict=True))

    def _argument(self, place: int, values: Sequence[Any]) -> Any:
        if place not in self._containers:
            return values[place]
        spec, shared = self._containers[place]
        leaves = [values[shared[index]] if index in shared else leaf for index, leaf in enumerate(values[place])]
        return tree_unflatten(leaves, spec)


class _Nesting(threading.local):
    inside = False
    """Whether this thread runs a function that is computed again."""


_nesting = _Nesting()

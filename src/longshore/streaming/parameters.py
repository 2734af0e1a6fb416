"""One parameter that rests in host memory: its copy on the device, and the way of its gradient back.

While a block is used, its modules have a *twin* in the place of each parameter: a tensor on the device, made once, from
the parameter, by two autograd functions. So a parameter that is used twice has its gradients added on the device, as
without streaming, and the sum goes through both functions once: to the host on the device's thread of autograd, and on,
when the copy is done, to the parameter's own hooks and its ``.grad`` on the thread that called ``backward()``.

A forked process, such as a worker of a data loader, does not have such memory: a fork would copy all of it, or move
pages away from where the copy engines look.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longshore.accelerator import mark_on
from longshore.errors import LongshoreError, ParameterError
from longshore.tiles import Ranges, Recorder
from longshore.tiles.events import COPY_TO_HOST, FETCH, NO_RECORDER, Recorders, annotating
from longshore.transfer import Copy, DeviceCopyStream, DeviceFetch, PinnedPool, copy_on_fork

_FIRST = (1 << 63) - 1
"""Sequence number of functions that backward runs as soon as it can."""

_HARMLESS = frozenset({"__repr__", "__hash__", "size", "stride", "dim", "numel", "element_size", "is_floating_point"})
_READ: list[Any] = [
    each.__get__  # pyright: ignore[reportAttributeAccessIssue]
    for each in (Tensor.shape, Tensor.dtype, Tensor.device, Tensor.requires_grad, Tensor.is_leaf)
]
"""Attributes that do not depend on the values."""


class Lanes:
    """The copies of one model: parameters to the device, and gradients to the host, each on a stream of its own.

    Args:
        device: where the model computes.
        in_flight_bytes: how many bytes of gradients may be on their way to the host, and in device memory, before
            backward waits.

    Attributes:
        recorders: who is told of each copy.
        fetched_bytes: of parameters that were copied to the device so far.
        returned_bytes: of gradients that were copied to the host so far.
    """

    def __init__(self, device: torch.device, in_flight_bytes: int) -> None:
        self.device = device
        self.to_device = DeviceCopyStream(device)
        self.to_host = DeviceCopyStream(device, in_flight_bytes)
        self.fetched_bytes = self.returned_bytes = 0
        self._memory = PinnedPool()
        self.recorders: Sequence[Recorder] = ()
        self._recorder: Recorder = NO_RECORDER
        if annotating():
            self.set_recorders([Ranges()])
        self._landing: dict[int, Copy] = {}
        """Copies of gradients that may be under way, by the address that they go to."""

    def set_recorders(self, recorders: Sequence[Recorder]) -> None:
        """Tell these recorders, and no others, of each copy from here on."""
        self.recorders = tuple(recorders)
        self._recorder = Recorders(self.recorders) if self.recorders else NO_RECORDER
        self.to_device.times_copies = self.to_host.times_copies = any(each.times_copies for each in self.recorders)

    def fetch(self, values: Tensor) -> DeviceFetch:
        """Begin to copy values in pinned memory to new memory on the device."""
        self.fetched_bytes += values.nbytes
        recorder = self._recorder
        begin_ns = recorder.begin(FETCH, None)
        with torch.inference_mode(False), torch.no_grad():
            target = torch.empty_like(values, device=self.device)
            fetch = self.to_device.fetch(values, target, target)
        recorder.copying(FETCH, None, fetch, begin_ns)
        return fetch

    def reach(self, fetch: DeviceFetch) -> Tensor:
        """Return the fetched tensor; later work of the current stream waits for the copy."""
        if not self.to_device.times_copies:
            return fetch.reach()
        begun = mark_on(self.device)
        values = fetch.reach()
        self._recorder.waited(begun, mark_on(self.device))
        return values

    def bring(self, gradient: Tensor) -> Tensor:
        """Begin to copy a gradient to the host; :meth:`land` waits for it."""
        self.returned_bytes += gradient.nbytes
        host = self._memory.empty_like(gradient)
        recorder = self._recorder
        begin_ns = recorder.begin(COPY_TO_HOST, None)
        copy = self.to_host.copy(gradient, host, self.to_host.mark())
        recorder.copying(COPY_TO_HOST, None, copy, begin_ns)
        self._landing[host.data_ptr()] = copy
        return host

    def land(self, gradient: Tensor) -> None:
        copy = self._landing.pop(gradient.data_ptr(), None)
        if copy is not None:
            copy.wait()
            del copy
            self.to_host.forget_finished()  # which would keep the gradient, so that autograd would copy it

    def forget_gradients(self) -> None:
        """Let go of gradients that a backward which raised brought to the host, and that were not taken."""
        self._landing.clear()


class _WaitForGradient(torch.autograd.Function):
    """Nothing in forward; in backward, wait until a gradient is on the host."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, lanes: Lanes) -> Tensor:
        ctx.lanes = lanes
        ctx.set_materialize_grads(False)
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if gradients[0] is not None:
            ctx.lanes.land(gradients[0])
        return gradients[0], None


class _ToDevice(torch.autograd.Function):
    """A tensor of the device that is given its memory; in backward, begin to bring its gradient to the host."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, lanes: Lanes) -> Tensor:
        ctx.lanes = lanes
        ctx.set_materialize_grads(False)
        return unbacked(values, lanes.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradient = gradients[0]
        if gradient is None:  # a function has none for this parameter, and plain torch leaves its .grad None
            return None, None
        if gradient.layout != torch.strided:
            return gradient.cpu(), None
        return ctx.lanes.bring(gradient), None


def unbacked(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of this shape without memory of its own: reads give NaN (or 0, of integers)."""
    fill = float("nan") if values.is_floating_point() or values.is_complex() else 0
    with torch.inference_mode(False), torch.no_grad():
        one = torch.full((1,), fill, dtype=values.dtype, device=device)
        # No view of it: autograd makes the functions of views anew when their memory changes.
        shared = torch.empty(0, dtype=values.dtype, device=device)
        return shared.set_(one.untyped_storage(), 0, values.shape, [0] * values.dim())  # pyright: ignore


_SINCE = "since forward"


class _Version(NamedTuple):
    """Where values were, and how often torch had seen them written."""

    address: int
    version: int


class StreamedParameter:
    """A parameter whose values rest in pinned memory.

    Args:
        name: in the model, for messages.
        rest: the parameter; its memory becomes ``memory``.
        memory: uint8, of the size of the parameter.
        lanes: its copies.
    """

    def __init__(self, name: str, rest: nn.Parameter, memory: Tensor, lanes: Lanes) -> None:
        self.name = name
        self.rest = rest
        self._lanes = lanes
        with torch.no_grad():
            # A dense parameter keeps its strides: other ones would choose other kernels.
            strides = torch.empty_like(rest, device="meta").stride()
            rest.data = memory.view(rest.dtype).as_strided(rest.shape, strides).copy_(rest.data)
        self._fetch: DeviceFetch | None = None
        self._fetched = self._now()
        self._placed = 0
        self._make_twin()

    def _make_twin(self) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            landed = _WaitForGradient.apply(self.rest, self._lanes)
            self.twin = _ToDevice.apply(landed, self._lanes)
        for made in (landed, self.twin) if self.rest.requires_grad else ():
            # Of what is ready, backward runs first what was made last, and gradients would wait for all of it.
            made.grad_fn._set_sequence_nr(_FIRST)

    def _now(self) -> _Version:
        return _Version(self.rest.data_ptr(), self.rest._version)

    def check(self) -> None:
        """Raise ParameterError if the parameter is no longer one that can be fetched; follow ``requires_grad``."""
        rest = self.rest
        if rest.device.type != "cpu" or rest.dtype != self.twin.dtype or rest.shape != self.twin.shape:
            raise ParameterError(
                f"parameter {self.name} rests on the host as {self.twin.dtype} {tuple(self.twin.shape)}, and is now "
                f"{rest.dtype} {tuple(rest.shape)} on {rest.device}; call model.to(...) before longshore.stream(...), "
                "which leaves the model where it is"
            )
        if getattr(rest, "grad_dtype", rest.dtype) != rest.dtype:
            raise ParameterError(
                f"parameter {self.name} has grad_dtype = {rest.grad_dtype}, in which its gradients cannot be added on "
                f"the device; leave it {rest.dtype}"
            )
        if rest.requires_grad != self.twin.requires_grad:
            self._make_twin()

    @property
    def is_fetched(self) -> bool:
        """Whether it has memory on the device."""
        return self._fetch is not None

    @property
    def is_there(self) -> bool:
        """Whether its values, as they are now, are on the device or on their way."""
        return self._fetch is not None and self._fetched == self._now()

    def fetch(self) -> None:
        """Begin to copy the values to the device, unless they are there."""
        if not self.is_there:
            self._fetched = self._now()
            self._fetch = self._lanes.fetch(self.rest.detach())

    def values(self) -> Tensor:
        """Return the values on the device; work of the current stream from now on sees them. :meth:`wait` has to
        follow."""
        self.fetch()
        assert self._fetch is not None
        return self._lanes.reach(self._fetch)

    def wait(self) -> None:
        """Wait until the values that are used are on the device.

        The caller of the model may write to the parameter as soon as that returns, and torch has no hook for that: a
        copy that is still under way would bring values of both. A block that was fetched ahead is not waited for; it is
        fetched again if it was written.
        """
        if (fetch := self._fetch) is not None:
            fetch.wait()

    def place(self) -> None:
        """Give the twin the values on the device, as :meth:`values`."""
        self.twin.data = self.values()
        self._placed = self.twin._version

    def check_unwritten(self) -> None:
        """Raise ParameterError if the twin or the parameter was written since it was placed."""
        if self._fetched != self._now():
            raise ParameterError(
                f"parameter {self.name} was written to while its block computed with the values that it had before: "
                "write to parameters of a streamed model between its calls"
            )
        if self.twin._version != self._placed:
            raise ParameterError(
                f"parameter {self.name} was written to in forward, on the device, where its values are a copy that is "
                "dropped: write to parameters of a streamed model between its calls"
            )

    def watch(self) -> Callable[[], None]:
        """Return :meth:`check_same` for the present parameter."""
        return functools.partial(self.check_same, self._now())

    def check_same(self, then: _Version) -> None:
        """Raise RuntimeError, as autograd does, if the parameter was written or given other memory since ``then``."""
        now = self._now()
        if now == then:
            return
        how = f"was given other memory (p.data = ...) {_SINCE}"
        if now.version != then.version:
            how = (
                "is needed for gradient computation, and has been modified by an inplace operation "
                f"{_SINCE} (version {now.version}, expected {then.version})"
            )
        raise RuntimeError(f"parameter {self.name} {how}: call backward() before step(), or forward again after it")

    def drop(self) -> None:
        """Free the memory on the device. Work that is enqueued already still reads it."""
        if self._fetch is not None:
            self._fetch = None
            self.twin.data = unbacked(self.twin, self._lanes.device)

    def save(self, tensor: Tensor, use: Callable[[], None]) -> SavedValues | None:
        """Return the values that autograd keeps for ``tensor``, which has memory of the twin; None: ``tensor``."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.dtype != self.rest.dtype or tensor.is_conj():
            return None
        place = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        return SavedValues(self, self._fetched, place, use)


class SavedValues(NamedTuple):
    """A view of a parameter that backward needs: fetched again when backward comes to it. ``use`` is called first."""

    parameter: StreamedParameter
    saved: _Version
    place: tuple[Any, Any, int]
    use: Callable[[], None]

    def restore(self) -> Tensor:
        """Raises RuntimeError, as autograd does, if the parameter was written in the meantime."""
        self.parameter.check_same(self.saved)
        self.use()
        with torch.no_grad():
            values = self.parameter.values()
            self.parameter.wait()
            return values.as_strided(*self.place)


class _LeftBehind:
    """Base class of parameters whose values are in another process: every use of them raises LongshoreError."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in _HARMLESS or func in _READ:
            return super().__torch_function__(func, types, args, kwargs or {})  # pyright: ignore
        raise LongshoreError(
            "this process was forked from the one that has the parameters, which rest in pinned memory, and has no "
            f"copy of them ({name} asked for one): use the model there, and give workers (of a data loader, say) "
            "copies of what they need (p.detach().clone())"
        )

    def __repr__(self, **_: Any) -> str:
        return "<parameter that rests in the pinned memory of another process>"


@functools.cache
def _left_behind(kind: type[Tensor]) -> type[Tensor]:
    return type("LeftBehind", (_LeftBehind, kind), {"__slots__": ()})


_resting: dict[int, Sequence[Tensor]] = {}
"""Parameters in memory that forked processes do not get, by the ``id`` of who put them there."""


def leave_behind_on_fork(owner: object, parameters: Sequence[Tensor]) -> Callable[[], object]:
    """Let every use of these parameters raise in processes that are forked, until ``owner`` is gone or the returned
    function is called."""
    _resting[id(owner)] = parameters
    done = weakref.finalize(owner, _copy_on_fork, id(owner))
    done.atexit = False
    return done


def _copy_on_fork(key: int) -> None:
    """Let processes that are forked from now on have copies of parameters that are ordinary ones again."""
    parameters = _resting.pop(key)
    gradients = [each.grad for each in parameters if type(each.grad) is Tensor]  # not placeholders, which have none
    copy_on_fork([*map(_local, parameters), *gradients])


def _local(parameter: Tensor) -> Tensor:
    """Return the tensor with the memory: the shard of a DTensor."""
    return getattr(parameter, "_local_tensor", parameter)


def _after_fork() -> None:
    for parameters in _resting.values():
        for tensor in (*parameters, *map(_local, parameters)):  # to_local() returns the latter
            if not isinstance(tensor, _LeftBehind):
                tensor.__class__ = _left_behind(type(tensor))


os.register_at_fork(after_in_child=_after_fork)

"""``longshore.stream``: train a model that is larger than its device, in any loop."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import grad_scaler
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from longshore.accelerator import is_accelerator, mark_on, wait_for
from longshore.byte_sizes import format_byte_size
from longshore.errors import LongshoreError
from longshore.streaming.blocks import Block, Place, Resident, in_backward, not_compiled
from longshore.streaming.checks import (
    Checkpoint,
    check_checkpoint,
    check_fits,
    check_parameters,
    check_selected,
    explain_devices,
    nbytes,
)
from longshore.streaming.methods import NOT_ONE_GRAPH, StreamedMethod
from longshore.streaming.parameters import Lanes, StreamedParameter, leave_behind_on_fork
from longshore.tiles import Recorder
from longshore.torch_versions import require
from longshore.transfer import allocate_pinned, part_of
from longshore.units import WrapPolicy, units_of

_ALIGNMENT_BYTES = 256

_streams: weakref.WeakSet[Stream] = weakref.WeakSet()

_Replicator = grad_scaler._MultiDeviceReplicator


class StreamCounts(NamedTuple):
    """Counts of a streamed model's copies and waits, since ``longshore.stream``."""

    fetched_bytes: int
    """Parameters that were copied to the device."""
    returned_bytes: int
    """Gradients that were copied to the host."""
    in_time: int
    """Uses of a block that was on the device, or on its way, when it was used."""
    late: int
    """Uses of a block that nobody had expected: the device waited for the whole copy."""
    resident_bytes: int
    """The most bytes of parameters that were on the device at once."""


class Stream:
    """A model whose parameters rest in host memory; made by :func:`stream`.

    Attributes:
        device: where the model computes.
        checkpoint: as in :func:`stream`.
        closed: whether the model is a plain one again.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, units: Sequence[nn.Module], checkpoint: Checkpoint = False
    ) -> None:
        self._model = model
        self.closed = False
        self.checkpoint: Checkpoint = checkpoint
        self.device = device
        self._resident = Resident(device)
        self._calls = self._calls_in_backward = 0
        """Calls of the model, or of one of its blocks, that are under way; and those that backward makes to compute
        them again."""
        names = {id(module): name for name, module in model.named_modules()}
        owners = {id(inner): unit for unit in reversed(units) for inner in unit.modules()}  # inner units come first
        places: dict[int, list[tuple[nn.Module, str, nn.Parameter]]] = {id(unit): [] for unit in (*units, model)}
        for module in model.modules():
            owner = owners.get(id(module), model)
            places[id(owner)] += [
                (module, name, parameter) for name, parameter in module._parameters.items() if parameter is not None
            ]
        self._streamed: dict[int, StreamedParameter] = {}
        contents = [[parameter for _, _, parameter in found] for found in places.values()]
        check_fits(model, device, contents)
        self._lanes = Lanes(device, max(map(nbytes, contents)))
        self._blocks = [self._block(names[id(unit)], unit, places[id(unit)]) for unit in (*units, model)]
        self._resident.blocks, self._resident.kept = self._blocks, self._blocks[-1]
        self._buffers = [(module, name) for module in model.modules() for name in module._buffers]
        self._move_buffers(device)
        # All of them: a checkpoint computes any of them again, by itself.
        self._modules = [module for module in model.modules() if next(module.parameters(), None) is not None]
        inside = {id(inner) for unit in units for inner in unit.modules() if inner is not unit}
        outer = {id(unit) for unit in units} - inside
        blocks = dict(zip((id(unit) for unit in (*units, model)), self._blocks, strict=True))
        self._methods: list[StreamedMethod] = []
        for module in self._modules:
            block = blocks[id(owners.get(id(module), model))]
            watched = [self._streamed[id(each)] for each in module.parameters()]
            # A language model's generate() asks where the parameters are, and puts inputs there, before it calls it.
            for method in ("forward", *(["generate"] if callable(getattr(module, "generate", None)) else [])):
                again = checkpoint is not False and method == "forward" and id(module) in outer
                made = StreamedMethod(self, module, block, names[id(module)], method, watched if again else None)
                self._methods.append(made)
        _streams.add(self)
        self._ends_guard = leave_behind_on_fork(self, [each.rest for each in self._streamed.values()])

    def _block(self, name: str, module: nn.Module, found: Sequence[tuple[nn.Module, str, nn.Parameter]]) -> Block:
        """Move the parameters of a block to one piece of pinned memory."""
        inside = {id(parameter): parameter for _, _, parameter in found if id(parameter) not in self._streamed}
        sizes = {key: -(-parameter.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for key, parameter in inside.items()}
        memory, begin = self._pinned(sum(sizes.values())), 0
        named = {id(parameter): full for full, parameter in self._model.named_parameters()}
        for key, parameter in inside.items():
            part = part_of(memory, begin, parameter.nbytes)
            self._streamed[key] = StreamedParameter(named[key], parameter, part, self._lanes)
            begin += sizes[key]
        places = [Place(module, attribute, self._streamed[id(parameter)]) for module, attribute, parameter in found]
        return Block(name, module, places, self._resident)

    def _pinned(self, num_bytes: int) -> Tensor:
        try:
            return allocate_pinned(num_bytes)
        except RuntimeError as error:
            before = sum(parameter.rest.nbytes for parameter in self._streamed.values())
            whole = nbytes(self._model.parameters())
            raise LongshoreError(
                f"{format_byte_size(num_bytes)} of host memory cannot be pinned, after {format_byte_size(before)} of "
                f"the {format_byte_size(whole)} that the parameters take ({str(error).splitlines()[0]}): free memory, "
                "or raise the limit of locked memory (ulimit -l)"
            ) from error

    def _move_buffers(self, device: torch.device) -> None:
        moved: dict[int, Tensor] = {}
        for module, name in self._buffers:
            buffer = module._buffers[name]
            if buffer is not None:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))

    @property
    def counts(self) -> StreamCounts:
        """Counts of copies and waits so far."""
        lanes, resident = self._lanes, self._resident
        return StreamCounts(
            lanes.fetched_bytes, lanes.returned_bytes, resident.in_time, resident.late, resident.most_bytes
        )

    def streams(self, parameter: Tensor) -> bool:
        """Return whether this is one of the parameters, and the stream is not closed."""
        return id(parameter) in self._streamed and not self.closed

    @property
    def recorders(self) -> Sequence[Recorder]:
        """Who is told of each copy; see :class:`~longshore.tiles.Recorder`."""
        return self._lanes.recorders

    def set_recorders(self, recorders: Sequence[Recorder]) -> None:
        """Tell these recorders, and no others, of each copy from here on."""
        self._lanes.set_recorders(recorders)

    def explain(self) -> str:
        """Return a description: the blocks and their bytes, the copies, and how often a block came too late."""
        *blocks, kept = self._blocks
        counts = self.counts
        largest = sorted((block.num_bytes for block in blocks), reverse=True)[:2]
        lines = [
            f"{len(blocks)} blocks rest on the host, {format_byte_size(sum(block.num_bytes for block in blocks))}; two "
            f"of them are on {self.device} at once, at most {format_byte_size(sum(largest))}",
            f"on the device from forward to the next: {format_byte_size(kept.num_bytes)} that are in no block",
            f"copied to the device: {format_byte_size(counts.fetched_bytes)}; gradients to the host: "
            f"{format_byte_size(counts.returned_bytes)}",
            f"used {counts.in_time + counts.late} times; {counts.late} of them not foreseen: the device waited for the "
            "copy",
        ]
        return "\n".join(lines)

    def close(self) -> None:
        """Make the model a plain one on the CPU again. Gradients and parameters stay as they are."""
        with self._resident.calls_end:
            if self._calls or (in_backward() and self._calls_in_backward) or not self._backward_ends():
                raise LongshoreError("the model is being called; call close() after forward and backward")
            if self.closed:
                return
            self.closed = True  # also for methods that somebody has wrapped in others since
        self._resident.begin()
        for method in self._methods:
            method.unwrap()
        self._move_buffers(torch.device("cpu"))
        self._ends_guard()

    @torch.compiler.disable(recursive=False, reason=NOT_ONE_GRAPH)
    def call(self, block: Block, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a method of a module of the model with its block in use. The method may be compiled."""
        kept_out, failed = self._begin_call(block), True
        try:
            with kept_out:
                result = method(*args, **kwargs)
            failed = False
            return result
        finally:
            self._end_call(block, failed)

    @not_compiled
    def _begin_call(self, block: Block) -> AbstractContextManager[Any]:
        if torch.is_autocast_enabled(self.device.type):
            raise LongshoreError(
                "autocast keeps its casts of parameters, which a streamed model's are not there for; use bfloat16 "
                "parameters (model.bfloat16()) with float32 masters in longshore.AdamW, and no autocast"
            )
        if torch._C._get_tracing_state() is not None:
            raise LongshoreError(
                "torch.jit.trace and torch.onnx.export would record the copies of parameters that a call has: call "
                "close() of the stream first"
            )
        transformed = torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore
        if transformed or forward_ad._current_level >= 0:
            raise LongshoreError(
                "torch.func and forward-mode derivatives (grad, jvp, vmap, dual tensors) do not see parameters that "
                "are fetched as they are used: call close() of the stream first, or use loss.backward()"
            )
        backward = in_backward()  # which computes it again
        if not self._calls and not backward:
            if self._calls_in_backward and not self._backward_ends():
                raise LongshoreError(
                    "a backward of another thread computes the model again; call it from one thread at a time"
                )
            self._methods = [method.follow() for method in self._methods]
            self._resident.begin()
            self._lanes.forget_gradients()
        self._count(backward, 1)
        try:
            if self.closed:
                raise LongshoreError(
                    "the stream was closed while another thread called the model; close it after forward and backward"
                )
            # Selective checkpointing would keep, and count, what fetches.
            unseen = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else contextlib.nullcontext()
            with unseen:
                return block.begin_use()
        except BaseException:
            self._count(backward, -1)
            raise

    def _count(self, backward: bool, change: int) -> None:
        """Count a call that begins or ends."""
        if not backward:
            self._calls += change
            return
        with self._resident.calls_end:
            self._calls_in_backward += change
            self._resident.calls_end.notify_all()

    def _backward_ends(self) -> bool:
        """Wait for calls that a backward makes which raised: on the thread that called it, while the device's thread
        still computes; return whether they have ended."""
        with self._resident.calls_end:
            return not self._calls_in_backward or self._resident.wait_until(lambda: not self._calls_in_backward)

    @not_compiled
    def _end_call(self, block: Block, failed: bool) -> None:
        backward = in_backward()
        try:
            if torch._C._len_torch_dispatch_stack() and not failed:
                check_selected({each.twin.untyped_storage().data_ptr(): each.name for each in block.parameters})
        finally:
            try:
                block.end_use(failed)
            finally:
                self._count(backward, -1)
        if not (self._calls_in_backward if backward else self._calls):
            self._resident.check_sums(failed)

    @not_compiled
    def explain_error(self, error: RuntimeError, name: str, given: Any) -> LongshoreError | None:
        """Return a clearer error for one that a module of this name raised; None: there is none."""
        return explain_devices(error, name, self._model, self.device, self.streams, given)


def stream(
    model: nn.Module,
    device: torch.device | str = "cuda",
    *,
    blocks: WrapPolicy = "auto",
    checkpoint: Checkpoint = False,
) -> Stream:
    """Let a model's parameters rest in host memory, and copy them to ``device`` block by block as they are used.

    The model, called as before, computes on ``device``: its inputs have to be there. The block that was used next the
    last time is copied while one computes, in forward and in backward, and its memory is freed when another one is
    used; what is in no block stays on the device from one call of the model to the next. Between calls, parameters are
    ordinary ones on the CPU, in pinned memory: an optimizer steps them there, and gradients come to their ``.grad``,
    where hooks and ``clip_grad_norm_`` find them. The weights are those without streaming, bit for bit.

    Build the optimizer afterwards: ``longshore.AdamW(model.parameters(), release_gradients=True)``.

    Args:
        model: on the CPU, with parameters of its own. Its buffers move to ``device``.
        device: an accelerator.
        blocks: which modules are blocks, as ``wrap_policy`` of ``longshore.initialize``: ``"auto"`` (transformer
            blocks, or modules that repeat in a list), names of classes, a number of elements, or a function of name and
            module.
        checkpoint: whether backward computes each block again, instead of keeping what it computes on the device. With
            ``"cpu"`` the inputs of the blocks are kept in host memory as well, copied there and back while others
            compute. The gradients have the same bits.

    Returns:
        A handle that counts copies (:attr:`Stream.counts`, :meth:`Stream.explain`); it need not be kept.

    Raises:
        ValueError: torch is too old, ``device`` is no accelerator of this machine, the model has no such blocks, or two
            of them do not fit in the memory that is free there; or ``checkpoint`` is something else, or the model
            checkpoints its blocks itself.
        ParameterError: a parameter cannot be streamed; it is named.
        LongshoreError: host memory cannot be pinned. The model is as before.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"longshore.stream takes a torch.nn.Module, not {type(model).__name__}")
    require("longshore.stream")
    device = _accelerator(device)
    if device.index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    if found := streams_of(model.parameters()):
        inside = [name for name, each in model.named_modules() if name and found[0]._model is each]
        which = f"{type(model).__name__} is" if not inside else f"{inside[0]}, a module of {type(model).__name__}, is"
        raise LongshoreError(f"{which} streamed already; call close() of its stream first")
    check_parameters(model)
    units = units_of(model, blocks, "blocks")
    if not units:
        none = "no modules that repeat" if blocks == "auto" else f"no module that blocks={blocks!r} makes a block"
        raise ValueError(
            f"{type(model).__name__} has {none}, so all of it would be on the device at once: say which modules are "
            "its blocks, as in blocks=['Block'] (a class) or blocks=1_000_000 (elements)"
        )
    check_checkpoint(model, checkpoint)
    wait_for_scales()
    return Stream(model, device, units, checkpoint)


def _accelerator(device: object) -> torch.device:
    """Return an accelerator of this machine; raise ValueError for anything else."""
    found = None
    with contextlib.suppress(TypeError, RuntimeError):  # a number without an accelerator; a word that torch lacks
        found = torch.device(device)  # pyright: ignore[reportArgumentType]
    if found is None or not is_accelerator(found):
        raise ValueError(
            f"longshore.stream copies parameters to an accelerator, and {device} is none of this machine: leave it out "
            "where the model trains on the CPU, in whose memory it rests anyway; longshore plan --stream --gpu "
            "NAME says what it would do there, and make demo in the repository streams to a simulated device"
        )
    return found


def streams_of(parameters: Iterable[Tensor]) -> list[Stream]:
    """Return the streams that have any of these parameters."""
    parameters = list(parameters)
    return [each for each in _streams if any(map(each.streams, parameters))]


def wait_for_scales() -> None:
    """Let scalers wait for a number that they copy from an accelerator to the host, where the CPU reads it at once.

    The scale is on the accelerator, like the loss, and the gradients of a streamed model are not. torch copies from one
    to the other with ``non_blocking=True``; its own optimizers have no parameters on the CPU then.
    """
    if not hasattr(_Replicator.get, "__wrapped__"):
        _Replicator.get = _waiting(_Replicator.get)


def _waiting(get):  # pyright: ignore
    @functools.wraps(get)
    def waiting(self: _Replicator, device: torch.device) -> Tensor:
        copied = get(self, device)
        if copied.device.type == "cpu" and is_accelerator(self.master.device):
            wait_for(mark_on(self.master.device))
        return copied

    return waiting

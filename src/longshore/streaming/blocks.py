"""Blocks: the parameters that are on the device together, and which of them are there.

At most two blocks are on the device: the one in use, and the one that was used next the last time. Nothing depends on
that order but the time: a block that is not there when it is used is fetched then. A forward that backward computes
again has the inputs, parameters and buffers that forward had.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.modules.module as _every_module
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from longshore.errors import LongshoreError, ParameterError
from longshore.kernels import checksums_on
from longshore.streaming.checks import replaced
from longshore.streaming.parameters import SavedValues, StreamedParameter

_OF_HOOKS = ("longshore.streaming.blocks", "torch._dynamo.eval_frame")
"""Modules whose functions are between the one that saves and :func:`keep_input`: hooks, one inside of another, and what
keeps them from being compiled."""

F = TypeVar("F", bound=Callable[..., Any])

_SECONDS = 60.0
"""How long a call waits for the end of a backward that another thread is in."""


class _WithInputs:
    """A call that a checkpoint computes again, with its own inputs in the place of those that autograd made of them.

    Args:
        compute: called with the inputs.
        count: how many inputs the call has.
    """

    def __init__(self, compute: Callable[..., None], count: int) -> None:
        self._compute = compute
        self.inputs: list[Tensor | None] = [None] * count

    def __call__(self, *args: Any) -> None:
        self._compute(*(arg if own is None else own for arg, own in zip(args, self.inputs, strict=True)))


def keep_input() -> None:
    """Where a tensor is being saved as an input of a checkpoint, let the checkpoint compute again with that tensor.

    ``torch.utils.checkpoint`` lets autograd save each input. Without hooks, autograd returns the tensor that it saved;
    with hooks it makes a new one of it each time. So an input that is given twice, or again by name or in a container,
    would be two tensors where backward computes the call again, and ``q is k`` have another answer than in forward.

    To be called from the hook that saves it, which keeps its memory, and checks its version before.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _OF_HOOKS:
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") != "torch.utils.checkpoint":
        return
    # Up to Python 3.11 its comprehension over the inputs has a frame of its own.
    saving = frame if frame.f_code.co_name == "save_inputs" else frame.f_back
    if saving is None or saving.f_code.co_name != "save_inputs":
        return
    tensor, inputs, call = frame.f_locals["arg"], saving.f_locals["args"], saving.f_locals["self"]
    if not isinstance(call.recompute_fn, _WithInputs):
        call.recompute_fn = _WithInputs(call.recompute_fn, len(inputs))
    for index, each in enumerate(inputs):
        if each is tensor:
            call.recompute_fn.inputs[index] = each


class Unwritten:
    """Values with which a block computes besides its inputs, as they are now: with other values backward would compute
    another block again than forward had.

    Args:
        name: of the block in the model.
        module: the block.
        parameters: all of the block and of the modules inside of it.
    """

    def __init__(self, name: str, module: nn.Module, parameters: Sequence[StreamedParameter]) -> None:
        self._name = name
        self._parameters = [parameter.watch() for parameter in parameters]
        self._buffers = [
            (inside, each, each._version) for inside, each in module.named_buffers() if not each.is_inference()
        ]

    def _written_buffer(self) -> str | None:
        return next((f"{self._name}.{name}" for name, each, version in self._buffers if each._version != version), None)

    def check_after_forward(self) -> None:
        """Raise LongshoreError if the block has written to its buffers, which it would do again in backward."""
        if (name := self._written_buffer()) is not None:
            raise LongshoreError(
                f"{self._name} writes to its buffer {name} in forward, and would write to it again where backward "
                "computes it again: leave out checkpoint= in longshore.stream(...)"
            )

    def check(self) -> None:
        """Raise RuntimeError, as autograd does, if a parameter or a buffer was written since."""
        for check in self._parameters:
            check()
        if (name := self._written_buffer()) is not None:
            raise RuntimeError(
                f"buffer {name} is needed for gradient computation, and has been modified by an inplace operation "
                f"since forward, so that backward would compute {self._name} again with other values: write to it "
                "after backward()"
            )


def not_compiled(function: F) -> F:
    """Let torch.compile leave out a function and all that it calls."""
    return cast(F, torch.compiler.disable(function))


def in_backward() -> bool:
    """Return whether this thread runs code that autograd calls."""
    return torch._C._current_graph_task_id() != -1


def modules_of(module: nn.Module) -> Sequence[nn.Module]:
    """Return a module and all inside of it, as ``modules()``, in another order and without making their names."""
    found, new = {id(module): module}, [module]
    while new:
        for each in new.pop()._modules.values():
            if each is not None and id(each) not in found:
                found[id(each)] = each
                new.append(each)
    return list(found.values())


class Place(NamedTuple):
    """A module that has the parameter, and the name that it has there."""

    module: nn.Module
    name: str
    parameter: StreamedParameter


class Block:
    """Parameters that are fetched together, for the forward and the backward of one module.

    Args:
        name: of the module; "" is the model itself.
        module: that module.
        places: where its parameters are in its modules; one parameter may be in several.
        resident: the blocks of the model.
    """

    def __init__(self, name: str, module: nn.Module, places: Sequence[Place], resident: Resident) -> None:
        self.name = name
        self.module = module
        self.places = places
        self.parameters = list({id(place.parameter): place.parameter for place in places}.values())
        self._holders = list({id(each): each for each in (module, *(place.module for place in places))}.values())
        """Its module, and the modules that its parameters are in."""
        self._resident = resident
        self.users = 0
        """Calls of its module that are under way; its parameters are in its modules meanwhile."""
        self._user: tuple[int, bool] | None = None
        """The thread of these calls, and whether backward makes them."""
        self.is_old = False
        """Whether its parameters may have been written to since they were fetched for these calls."""
        self._by_memory: dict[int, StreamedParameter] = {}
        """Its parameters, by the address of the memory that they have while it is in use."""
        self._sums: Tensor | None = None
        """Checksums of them as they were placed, where hooks run that may write to them unseen."""

    @property
    def num_bytes(self) -> int:
        return sum(parameter.rest.nbytes for parameter in self.parameters)

    @property
    def has_pre_hooks(self) -> bool:
        """Whether one of its modules has users' hooks that run before forward."""
        return any(each._forward_pre_hooks for each in self._holders)

    def _look_for_hooks(self) -> bool:
        """Return whether there are hooks that run while the block's modules have its parameters on the device.

        Raises:
            LongshoreError: a hook that runs in backward would look for gradients before they are there.
        """
        inside = bool(_every_module._global_forward_pre_hooks or _every_module._global_forward_hooks)
        in_backward = bool(_every_module._global_backward_hooks or _every_module._global_backward_pre_hooks)
        for each in modules_of(self.module):
            if each._backward_hooks or each._backward_pre_hooks:
                in_backward = True
            if (each._forward_pre_hooks or each._forward_hooks) and each is not self.module:
                inside = True
        if in_backward and torch.is_grad_enabled() and self._resident.trains():
            raise self._hooked_in_backward()
        return inside

    def _hooked_in_backward(self) -> LongshoreError:
        named = self.module.named_modules(prefix=self.name)
        hooked = (name for name, each in named if each._backward_hooks or each._backward_pre_hooks)
        of_all = bool(_every_module._global_backward_hooks or _every_module._global_backward_pre_hooks)
        return LongshoreError(
            f"{('every module' if of_all else next(hooked)) or 'the model'} has a full backward hook, or one before "
            "its backward, which would not find the gradients of parameters in .grad: those of a streamed model come "
            "to the host while backward goes on. Remove the hook, and use "
            "parameter.register_post_accumulate_grad_hook(...) for gradients of "
            "parameters, or output.register_hook(...) for those of what a module returns"
        )

    def fetch(self) -> None:
        for parameter in self.parameters:
            parameter.fetch()

    def use(self) -> None:
        """Note that backward or forward comes to this block."""
        self._resident.use(self)

    @not_compiled
    def begin_use(self) -> AbstractContextManager[Any]:
        """Give the modules of the block its parameters on the device, until :meth:`end_use`; return the context that
        keeps them out of autograd's graph."""
        if self._take():
            try:
                with self._resident.lock:
                    hooked = self._enter()
                for parameter in self.parameters:  # not with the lock, for which backward's threads may wait
                    parameter.wait()
                self._sums = self._checksums() if hooked else None
            except BaseException:
                self.end_use(failed=True)
                raise
        return saved_tensors_hooks(*self._hooks())

    def _take(self) -> bool:
        """Count a call of this thread, and return whether it is the first one under way.

        Raises:
            LongshoreError: another thread calls the block. A backward that raised is waited for: it may have raised on
                the thread that began it, while the device's thread still computes the block again.
        """
        here, backward = threading.get_ident(), in_backward()
        user = self._user
        if user is not None and user[0] == here:  # which alone ends its calls, so that nothing is to be guarded
            self.users += 1
            return False
        with self._resident.calls_end:
            if (
                self._user is not None  # but another thread
                and (backward or not self._user[1] or not self._resident.wait_until(lambda: self._user is None))
            ):
                raise LongshoreError(f"two threads call {self.name or 'the model'} at once; call it from one at a time")
            self.users, self._user = 1, (here, backward)
        return True

    @not_compiled
    def end_use(self, failed: bool) -> None:
        """End what :meth:`begin_use` began; ``failed`` says whether an error is under way."""
        if self.users > 1:
            self.users -= 1
            return
        try:
            if not failed:
                for parameter in self.parameters:
                    parameter.check_unwritten()
                self._compare_sums()
        finally:
            with self._resident.lock:  # so that Resident.begin finds the block in use, or comes after this
                for module, name, parameter in self.places:
                    if module._parameters.get(name) is parameter.twin:
                        module._parameters[name] = parameter.rest
                self._resident.leave(self)
                with self._resident.calls_end:
                    self.users, self._user = 0, None
                    self._resident.calls_end.notify_all()

    def _checksums(self) -> Tensor | None:
        there = [_bits(each.twin) for each in self.parameters if each.twin.numel()]
        return checksums_on(self._resident.device)(there) if there else None

    def _compare_sums(self) -> None:
        """Begin to look whether a hook wrote to a parameter where torch cannot see it."""
        before, self._sums = self._sums, None
        now = None if before is None else self._checksums()
        if before is not None and now is not None:
            self._resident.compared.append((self, now != before))

    def check_sums(self, differ: Tensor) -> None:
        """Raise ParameterError if checksums of the block's parameters differ from those before its forward."""
        if differing := differ.nonzero().flatten().tolist():
            there = [each for each in self.parameters if each.twin.numel()]
            raise ParameterError(
                f"parameter {there[differing[0]].name} was written to in a hook of a module inside "
                f"{self.name or 'the model'}, on the device, where its values are a copy that is dropped: write to "
                "parameters of a streamed model between its calls"
            )

    def _enter(self) -> bool:
        """Give the modules the parameters; return whether hooks run while they have them."""
        hooked = self._look_for_hooks()
        for module, name, parameter in self.places:
            if module._parameters.get(name) is not parameter.rest:
                raise replaced(parameter.name, module._parameters.get(name), self.module)
            parameter.check()
        if self.has_pre_hooks:  # they may have written to a parameter unseen (p.data.clamp_()) after it was fetched
            self._resident.forget(self)
        self.use()
        for parameter in self.parameters:
            parameter.place()
        self._by_memory = {
            each.twin.untyped_storage().data_ptr(): each for each in self.parameters if each.twin.numel()
        }
        for module, name, parameter in self.places:
            module._parameters[name] = parameter.twin  # pyright: ignore[reportArgumentType]
        return hooked

    def _hooks(self) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """Hooks that keep no parameter in autograd's graph; other tensors go to the hooks around them, if there are."""
        around = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]
        return functools.partial(self._pack, self._by_memory, around), _unpack

    @not_compiled
    def _pack(self, by_memory: Mapping[int, StreamedParameter], around: Any, tensor: Tensor) -> Any:
        if tensor.layout == torch.strided and tensor.device == self._resident.device:
            parameter = by_memory.get(tensor.untyped_storage().data_ptr())
            saved = None if parameter is None else parameter.save(tensor, self.use)
            if saved is not None:
                return saved
        if around is not None:
            return _Packed(around[0](tensor), around[1])
        if tensor.is_inference():
            return tensor
        keep_input()
        # Not the tensor itself: it may be the output of the function that keeps it, which would then keep itself.
        return _Kept(tensor.detach(), tensor._version)


def _bits(values: Tensor) -> Tensor:
    """Return the elements of a dense tensor, flat, as a dtype that checksums take; none of their bits is left out."""
    flat = values.detach().as_strided((values.numel(),), (1,))
    if flat.element_size() == 1:
        return flat.view(torch.uint8).bfloat16()  # which has each number of eight bits
    return flat.view(torch.bfloat16 if flat.element_size() == 2 else torch.float32)


class _Kept(NamedTuple):
    """A tensor as autograd keeps it, and how often it had been written: torch checks that only without hooks."""

    tensor: Tensor
    version: int

    def check(self) -> None:
        """Raise RuntimeError, as autograd does, if the tensor was written since."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.tensor.dtype} {list(self.tensor.shape)} is at version {self.tensor._version}; expected version "
                f"{self.version} instead"
            )


class _Packed(NamedTuple):
    """What the hooks around ours made of a tensor, and the one that makes a tensor of it again."""

    value: Any
    unpack: Callable[[Any], Tensor]


@not_compiled
def _unpack(saved: Any) -> Tensor:
    if isinstance(saved, SavedValues):
        return saved.restore()
    if isinstance(saved, _Kept):
        saved.check()
        return saved.tensor
    return saved.unpack(saved.value) if isinstance(saved, _Packed) else saved


class Resident:
    """Which blocks of a model are on the device.

    Attributes:
        blocks: of the model, the kept one too.
        kept: the block of parameters that are in no other one, which stays from the beginning of a call of the model to
            the beginning of the next.
        in_time, late: blocks that were on their way when they were used, and those that were not.
        most_bytes: the most bytes of parameters that were on the device at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        """Forward and autograd's threads use blocks."""
        self.calls_end = threading.Condition()
        """Guards which threads call blocks; notified where a call ends."""
        self.blocks: Sequence[Block] = ()
        self.compared: list[tuple[Block, Tensor]] = []
        """Blocks whose checksums were compared in the call under way, and on the device where they differ."""
        self.kept: Block | None = None
        self.in_time = self.late = self.most_bytes = 0
        self._there: list[Block] = []
        self._before: Block | None = None
        self._now: Block | None = None
        self._next: dict[tuple[Block | None, Block], Block] = {}
        """The block that was used after two others, in their order, the last time."""

    def begin(self) -> None:
        """Forget the copies on the device: between two calls of the model its parameters may have been written
        unseen."""
        with self.lock:
            # All blocks, and not those that should be there: a backward that raised may have fetched one since. It may
            # also use one still, for which the values that it has are good enough.
            for block in self.blocks:
                block.is_old = block.users > 0
                for parameter in block.parameters if not block.users else ():
                    parameter.drop()
            self._there = [block for block in self._there if block.users]
            self._before = self._now = None

    def wait_until(self, ended: Callable[[], bool]) -> bool:
        """Wait for the end of calls that another thread's backward makes; return whether it came. To be called with
        ``calls_end``."""
        return self.calls_end.wait_for(ended, _SECONDS)

    def check_sums(self, failed: bool) -> None:
        """Raise the findings of a call's comparisons, unless it has failed; the host waits once for all blocks."""
        compared, self.compared = self.compared, []
        for block, differ in compared if not failed else ():
            block.check_sums(differ)

    def trains(self) -> bool:
        """Return whether any parameter of the model gets a gradient."""
        return any(each.rest.requires_grad for block in self.blocks for each in block.parameters)

    def leave(self, block: Block) -> None:
        """Note the end of a block's use, which :meth:`begin` could not forget."""
        if block.is_old:
            block.is_old = False
            self.forget(block)

    def forget(self, block: Block) -> None:
        """Free the parameters of a block that no other block in use has: their values may be old."""
        with self.lock:
            others = [each for each in [*self._there, self.kept] if each is not None and each.users]
            for parameter in block.parameters:
                if not any(parameter in each.parameters for each in others if each is not block):
                    parameter.drop()

    def use(self, block: Block) -> None:
        """Fetch a block that is used now, and the one that was used after it the last time; free the others."""
        with self.lock:
            if block is self.kept:
                block.fetch()
                self._count()
                return
            if block is self._now and all(parameter.is_there for parameter in block.parameters):
                return
            if all(parameter.is_there for parameter in block.parameters):
                self.in_time += 1
            else:
                self.late += 1
            if block is not self._now:
                if self._now is not None:
                    self._next[self._before, self._now] = block
                self._before, self._now = self._now, block
            ahead = self._next.get((self._before, block))
            for other in self._there:
                if other is not block and other is not ahead:
                    for parameter in other.parameters:
                        if not self._shared(parameter, block, ahead):
                            parameter.drop()
            self._there = [other for other in self._there if other.users and other is not block and other is not ahead]
            self._there.append(block)
            block.fetch()
            if ahead is not None:
                self._there.append(ahead)
                with contextlib.suppress(torch.OutOfMemoryError):  # there is time, and there may be memory later
                    ahead.fetch()
            self._count()

    def _count(self) -> None:
        blocks = [*self._there, *([] if self.kept is None else [self.kept])]
        there = {id(each): each for block in blocks for each in block.parameters if each.is_fetched}
        self.most_bytes = max(self.most_bytes, sum(each.rest.nbytes for each in there.values()))

    def _shared(self, parameter: StreamedParameter, *blocks: Block | None) -> bool:
        in_use = [block for block in [*self._there, self.kept] if block is not None and block.users]
        return any(parameter in block.parameters for block in [*blocks, *in_use] if block is not None)

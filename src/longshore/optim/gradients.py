"""Sources of a window's gradients: ``.grad``, or the host, if it took them during backward.

Both read ``.grad`` as the user left it, so that whatever was done to it counts (accumulated, clipped, unscaled,
replaced, set to None). While the host has a parameter's gradient, ``.grad`` is a placeholder
(:class:`~longshore.optim.grad_placeholder.ReleasedGradient`) that has the right shape and dtype, takes no memory, and
raises an error in computations. As in torch, ``.grad`` then says whether the host's gradient still counts: it does
while ``.grad`` is the placeholder. None means that the gradient was discarded (``model.zero_grad()``), and any other
tensor that the user replaced it.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Set
from typing import TYPE_CHECKING

from torch import Tensor
from torch._compile import _disable_dynamo

from longshore.accelerator import has_graphs
from longshore.errors import GradientError, LongshoreError
from longshore.optim.dtensor import check_not_wrapped, flat, gradient_part, is_sum_over_ranks
from longshore.optim.grad_placeholder import (
    ReleaseHooks,
    concurrent,
    elsewhere,
    foreign,
    gradient_of,
    in_compiled_autograd,
    is_converted,
    is_released,
    new_placeholder,
    put_gradient,
    refuse_capture,
    refuse_compiled_autograd,
    remove_all,
)
from longshore.optim.parameters import ParameterRecord, check_trainable, has_hooks
from longshore.store import Store
from longshore.tiles import GRADIENT, Ended, Fingerprint, Seen

if TYPE_CHECKING:
    from typing_extensions import Self

_SOURCES: weakref.WeakSet[ReleasedGradients] = weakref.WeakSet()
_NUMBERS = itertools.count()


class GradientSource(ABC):
    """Base class of objects that find the gradients of a window for an optimizer.

    Attributes:
        members: returns the indices of the parameters that are in the optimizer's groups now. Users may take some out,
            which are then left alone, as in torch.
    """

    def __init__(self, store: Store, members: Callable[[], Set[int]]) -> None:
        self.store = store
        self.members = members
        self.records: dict[int, ParameterRecord] = {}
        self.replaced_by: Self | None = None
        """Source of the same optimizer after parameters were moved or converted before the first step."""
        self.added_to: dict[int, weakref.ref[Tensor]] = {}
        """What scripts had put into ``.grad`` where a backward added to it before the sum was taken to the host."""

    def watch(self, records: Sequence[ParameterRecord]) -> None:
        """Add parameters that can get gradients to the store. If one of them has a dtype that cannot be stepped, raise
        ValueError and add none."""
        new = [record for record in records if record.index not in self.store.ownership]
        for record in new:
            check_trainable(record.parameter, record.name)
        self.store.add_parameters(record.spec for record in new)

    def found(self, record: ParameterRecord, gradient: Tensor) -> Tensor:
        """Check a tensor found in ``.grad``, and return it flat, in the parameter's logical order."""
        record.check_gradient(gradient, same_dtype=self.store.tiles.streams.staged)
        found = flat(gradient if type(gradient) is Tensor else gradient_part(record.leaf(), gradient))
        # After p.grad = p.data, kernels would read the gradient where they write the parameter.
        return found.clone() if found.data_ptr() == record.held.data_ptr() else found

    @abstractmethod
    def register(self, records: Sequence[ParameterRecord]) -> None:
        """Add new parameters; if this raises, none of them is added."""

    @abstractmethod
    def collect(self) -> dict[int, Tensor | None]:
        """Return the gradient of each parameter that has one: flat, on the device, or None if the store has it.

        Raises:
            GradientError: a gradient cannot be counted; nothing was stepped.
        """

    def drop(self, records: Sequence[ParameterRecord]) -> None:
        """Forget parameters that the user took out of the groups, with their gradients."""
        for record in records:
            self.records.pop(record.index, None)
            self.store.window.arrived.pop(record.index, None)
        self.store.remove({record.index for record in records})

    def hook_unfrozen(self) -> None:
        """Add parameters that were frozen, or not gathered, until now."""
        return

    def gave_up(self, index: int) -> bool:
        """Return whether a newer source has this parameter, so that its ``.grad`` is not this one's any more."""
        return False

    @property
    def superseded(self) -> bool:
        """Whether a newer source has a parameter of this one."""
        return any(self.gave_up(index) for index in self.records)

    def fingerprint(self) -> Fingerprint:
        """Return the gradients of this window as they are now.

        Raises:
            GradientError: torch does not count writes to one of them.
        """
        seen, members = {}, self.members()
        for index, record in self.records.items():
            if index in members and (gradient := record.parameter.grad) is not None:
                if gradient.is_inference():
                    raise GradientError(
                        f"the gradient of parameter {record.name} was made in inference mode, where torch counts no "
                        "writes, so that it cannot be clipped: clone it outside (p.grad = p.grad.clone())"
                    )
                changes = self.store.arrivals(index) if is_released(gradient) else gradient._version
                seen[index] = Seen(record.name, weakref.ref(gradient), changes, self.added_to.get(index))
        return seen

    def zero_grad(self, how: Ended) -> None:
        """End the window without a step, with ``.grad`` set to None."""
        self.clear_grad()
        self.store.window.end(how)

    def clear_grad(self) -> None:
        """Set ``.grad`` of the parameters to None."""
        for index in self.members() & self.records.keys():
            if not self.gave_up(index):
                put_gradient(self.records[index], None)

    def remove_hooks(self) -> None:
        """Remove hooks from the parameters."""
        return

    def close(self) -> None:
        """Remove hooks from the parameters, and close the store."""
        self.remove_hooks()
        self.store.close()


class KeptGradients(GradientSource):
    """Source that takes ``.grad`` as it is at ``step()``; a parameter whose ``.grad`` is None is not stepped."""

    def register(self, records: Sequence[ParameterRecord]) -> None:
        self.watch([record for record in records if record.parameter.requires_grad])
        self.records.update((record.index, record) for record in records)

    def collect(self) -> dict[int, Tensor | None]:
        members = self.members()
        found: dict[int, Tensor | None] = {}
        for index, record in self.records.items():
            if index in members and (gradient := record.parameter.grad) is not None:
                if is_released(gradient):
                    raise elsewhere(record)
                found[index] = self.found(record, gradient)
        if thawed := [self.records[index] for index in found if index not in self.store.ownership]:
            self.watch(thawed)
        return found


class ReleasedGradients(GradientSource):
    """Source that takes each gradient to the host in a hook during backward, and leaves a placeholder.

    The host's gradient of a parameter counts only while ``.grad`` is the placeholder of this window. While autograd
    accumulates, the placeholder is lifted: taken out of ``.grad``.

    A source gives a parameter up to a newer source, as long as that one has hooks: a script that runs its set-up again,
    as in a notebook, may still have the former optimizer, or it waits for the garbage collector.
    """

    def __init__(self, store: Store, members: Callable[[], Set[int]]) -> None:
        super().__init__(store, members)
        store.window.on_end(self._ended)
        self._number = next(_NUMBERS)
        self._unchecked = store.alone  # an engine's model was checked
        self._wrapped: ValueError | None = None
        self._hooks: dict[int, ReleaseHooks] = {}
        self._indices: dict[int, int] = {}
        """The index of each parameter's record, by the identity of the parameter."""
        self._given_up: dict[int, weakref.ref[ReleasedGradients]] = {}
        """The newest of the other sources that have a parameter, if it is newer than this one."""
        _SOURCES.add(self)
        # These belong to one window.
        self._placeholders: dict[int, Tensor] = {}
        self._lifted: set[int] = set()
        self._entered: dict[int, int] = {}
        """Threads that accumulate into parameters, according to the hooks of the parameters' nodes."""
        self._lost: dict[int, Tensor] = {}
        """Placeholders that were discarded while their parameters were out of the groups. They stay in ``.grad``."""
        self._taken: Set[int] | None = None
        """Parameters whose gradients are taken in this window: those in the groups at its first gradient."""
        self._finalizer = weakref.finalize(self, remove_all, self._hooks)
        self._finalizer.atexit = False

    def register(self, records: Sequence[ParameterRecord]) -> None:
        trainable = [record for record in records if record.parameter.requires_grad and record.index not in self._hooks]
        self.watch(trainable)  # also what has no elements: all ranks lay out the same, whichever got gradients
        me: weakref.ref[ReleasedGradients] = weakref.ref(self)
        for record in trainable:
            leaf = record.leaf()
            if leaf is None or not leaf.requires_grad or record.kept.numel() == 0:
                continue  # no elements, or not gathered since it was made or thawed; hook_unfrozen() is called then
            # The hooks must not refer to the parameter: it could then not be garbage-collected.
            before, after = (
                functools.partial(_call, me, hook, record.index)
                for hook in (ReleasedGradients._before, ReleasedGradients._after)
            )
            self._hooks[record.index] = ReleaseHooks(leaf, before, after)
        self.records.update((record.index, record) for record in records)
        self._indices.update((id(record.parameter), record.index) for record in records)
        if trainable:
            for other in [each for each in _SOURCES if each is not self and each._finalizer.alive]:
                older, newer = sorted((self, other), key=lambda source: source._number)
                older._give_up_to(newer)

    def _give_up_to(self, newer: ReleasedGradients) -> None:
        theirs = {id(record.parameter) for record in newer.records.values()}
        for index, record in self.records.items():
            present = self._given_up.get(index, lambda: None)()
            if id(record.parameter) in theirs and (present is None or present._number < newer._number):
                self._given_up[index] = weakref.ref(newer)

    def gave_up(self, index: int) -> bool:
        newer = self._given_up.get(index, lambda: None)()
        # What replaced this one is of the same optimizer.
        return newer is not None and newer is not self.replaced_by and newer._finalizer.alive

    def index_of(self, parameter: Tensor) -> int | None:
        """Return the index of a parameter's record; None if the optimizer does not have it."""
        return self._indices.get(id(parameter))

    def drop(self, records: Sequence[ParameterRecord]) -> None:
        super().drop(records)
        for record in records:
            self._indices.pop(id(record.parameter), None)
        for index in [record.index for record in records if record.index in self._hooks]:
            self._placeholders.pop(index, None)
            self._hooks.pop(index).remove()

    def hook_unfrozen(self) -> None:
        self.register(list(self.records.values()))  # frozen parameters have no hooks until they thaw

    def check_first_backward(self) -> None:
        """Raise ValueError if a wrapper that was made before the first backward reduces the gradients itself: then none
        is taken, in any backward."""
        if self._unchecked:
            self._unchecked = False
            try:
                check_not_wrapped([record.parameter for record in self.records.values()])
            except ValueError as wrapped:
                self._wrapped = wrapped
        if self._wrapped is not None:
            raise self._wrapped

    def _takes(self, index: int) -> bool:
        if self._taken is None:
            try:
                self._taken = self.members()
            except ReferenceError:  # the optimizer is gone, and somebody still has a state of it
                self._taken = frozenset()
        return index in self._taken

    def _before(self, index: int) -> None:
        record = self.records[index]
        if not self._takes(index):
            if index in self._lost and record.parameter.grad is self._lost[index]:
                record.parameter.grad = None
                self._lifted.add(index)
            return
        refuse_capture(record.device)
        thread = threading.get_ident()
        if self._entered.setdefault(index, thread) != thread:
            raise concurrent(record)
        on_host, gradient = self._resolve(record)
        if gradient is not None and not is_released(gradient):
            self.added_to[index] = weakref.ref(gradient)
            return
        if gradient is None:
            return
        if record.leaf() is record.parameter:
            record.parameter.grad = None  # autograd must not add to a placeholder, not even another optimizer's
            if on_host:
                self._lifted.add(index)
        if not on_host and gradient is not self._placeholders.get(index):
            raise foreign(record)

    def _after(self, index: int) -> None:
        try:
            self._take(index)
        finally:
            self._entered.pop(index, None)

    def _take(self, index: int) -> None:
        record = self.records[index]
        if not self._takes(index):
            if index in self._lifted:
                self._lifted.discard(index)
                record.parameter.grad = self._lost[index]
            return
        leaf = record.leaf()
        assert leaf is not None
        if leaf is not record.parameter and not record.parameter.requires_grad:
            leaf.grad = None  # frozen since it was gathered; autograd adds nothing to a tensor that was frozen
            return
        gradient, placeholder = leaf.grad, self._placeholders.get(index)
        if gradient is None or (gradient is placeholder and is_released(gradient)):
            return  # this backward computed no gradient of the parameter
        if is_released(gradient):
            raise GradientError(
                f"another optimizer with release_gradients=True took the gradient of parameter {record.name}; "
                "call destroy() of the engine, or close() of the optimizer, that is not to have it"
            )
        record.check()
        if record.keeps_shard and gradient is not placeholder:
            self._resolve(record)  # FSDP2 wrote .grad without calling the first hook, which drops what was discarded
        if index not in self._entered:
            self._hooks[index].follow()  # the node that was hooked is no longer the parameter's
        if leaf is record.parameter and is_sum_over_ranks(gradient) and self.store.arrivals(index) == 0:
            return  # torch adds the addends of several backwards on each rank, and reduces once: collect() does too
        if in_compiled_autograd():
            if not self.store.alone:
                refuse_compiled_autograd()
            return  # it does not call the first hook, and would add the next gradient to a placeholder
        if has_graphs(record.device):
            gradient = gradient.clone()  # a replay may write its memory before it is copied
        self.store.arrive(index, self.found(record, gradient))
        self._count(index)
        self._lifted.discard(index)
        if leaf is not record.parameter:
            leaf.grad = None
            if has_hooks(record.parameter):
                raise GradientError(
                    f"parameter {record.name} has a hook on its gradient, which comes in another tensor where "
                    "parameters are sharded; hook the module (register_full_backward_hook), or use stage 2"
                )
        put_gradient(record, self._placeholder(record))

    def _placeholder(self, record: ParameterRecord) -> Tensor:
        placeholder = self._placeholders.get(record.index)
        # FSDP2 adds to the shard of a placeholder and replaces the shard by the sum, so a new one may be needed.
        if placeholder is None or not is_released(placeholder):
            placeholder = new_placeholder(record, self._hooks.get(record.index))
            self._placeholders[record.index] = placeholder
        return placeholder

    def _resolve(self, record: ParameterRecord) -> tuple[bool, Tensor | None]:
        """Return whether the host's gradient counts, and ``.grad``; discard the host's if it does not."""
        gradient, index = gradient_of(record), record.index
        on_host = self.store.arrivals(index) > 0
        is_ours = gradient is not None and gradient is self._placeholders.get(index) and not is_converted(gradient)
        if on_host and not is_ours and index not in self._lifted:
            # The user discarded the gradient (None) or replaced it. The old placeholder must not stand for the gradient
            # that arrives next.
            self.store.forget(index)
            self._placeholders.pop(index, None)
            self.store.window.arrived.pop(index, None)
            on_host = False
        return on_host, gradient

    def collect(self) -> dict[int, Tensor | None]:
        self.hook_unfrozen()
        return self._collected(self.records, self.members())

    def collect_one(self, index: int) -> dict[int, Tensor | None]:
        """Return the gradient of one parameter as :meth:`collect` does, without looking at the others."""
        return self._collected([index], self.members() if self._taken is None else self._taken)

    def _collected(self, indices: Iterable[int], members: Set[int]) -> dict[int, Tensor | None]:
        found: dict[int, Tensor | None] = {}
        for index in indices:
            record = self.records[index]
            if index not in members:
                if self.store.arrivals(index) > 0:
                    raise GradientError(
                        f"parameter {record.name} was taken out of its group after its gradient had left for the host: "
                        "take parameters out between windows, right after step() or zero_grad()"
                    )
                continue
            if self.gave_up(index):
                raise GradientError(
                    f"the gradients of parameter {record.name} go to another engine, or optimizer with "
                    "release_gradients=True, that was made after this one: go on with that one, or call its destroy() "
                    "(of an optimizer close())"
                )
            on_host, gradient = self._resolve(record)
            if index in self._lifted:
                raise GradientError(
                    f"a backward was interrupted while it accumulated the gradient of parameter {record.name}; "
                    "call zero_grad() to discard this window and go on"
                )
            if on_host:
                found[index] = None
            elif is_released(gradient):
                raise foreign(record)
            elif gradient is not None and record.leaf() is not record.parameter:
                raise GradientError(
                    f"the .grad of parameter {record.name}, of which each rank has a shard, was not brought by a "
                    "backward of this engine's model; to set a gradient use longshore.utils.safe_set_full_grad()"
                )
            elif gradient is not None:
                # It is from torch.autograd.grad, was assigned by hand, or the parameter was frozen or swapped before.
                if index in self._hooks:
                    self._hooks[index].follow()
                flat_gradient = self.found(record, gradient)
                self.watch([record])
                found[index] = self.store.arrive(index, flat_gradient, by_hook=False)
                if found[index] is None:
                    self._count(index)
                    put_gradient(record, self._placeholder(record))
        return found

    def _count(self, index: int) -> None:
        arrived = self.store.window.arrived
        arrived[index] = arrived.get(index, 0) + 1

    def _ended(self, how: Ended) -> None:
        if how is not Ended.STEPPED:
            members = self.members()
            self._lost.update((index, each) for index, each in self._placeholders.items() if index not in members)
        for each in (self.added_to, self._lifted, self._entered, self._placeholders):
            each.clear()
        self._taken = None
        self.clear_grad()

    def zero_grad(self, how: Ended) -> None:
        self.store.discard(how)

    def remove_hooks(self) -> None:
        self._finalizer()


@_disable_dynamo  # a backward inside a compiled function calls hooks while Dynamo looks at every call
def _call(source: weakref.ref[ReleasedGradients], hook: Callable[[ReleasedGradients, int], None], index: int) -> None:
    """Run a hook unless its source is gone. A failure ends the window, and is not raised into autograd (law 8)."""
    alive = source()
    if alive is None:
        return
    try:
        if alive._unchecked or alive._wrapped is not None:
            alive.check_first_backward()  # before anything is taken: a wrapper's own error would name neither
        if alive._taken is None:
            alive._takes(index)
        if alive.replaced_by is not None:
            parameter, alive = alive.records[index].parameter, alive.replaced_by
            index = next(each.index for each in alive.records.values() if each.parameter is parameter)
        if not alive._given_up or not alive.gave_up(index):
            hook(alive, index)
    except BaseException as failure:
        _fail(alive, index, failure)
        if not isinstance(failure, Exception):
            raise  # Ctrl-C ends the backward, and the window is incomplete


def _fail(source: ReleasedGradients, index: int, failure: BaseException) -> None:
    """End the window of a gradient that was not taken."""
    if source.store.tiles.broken is not None:
        return  # step() says that, and what to do
    own = isinstance(failure, LongshoreError)
    reason = failure if own else f"parameter {source.records[index].name}: {type(failure).__name__}: {failure}"
    error = GradientError(
        f"a gradient was not taken during backward: {reason} (zero_grad() discards this window, and training can go on)"
    )
    error.__cause__ = failure
    source.store.window.fail(error)


def released_gradient(parameter: Tensor) -> Tensor | None:
    """Return this process's part of a gradient that an optimizer took to the host in this window: flat, float32 on the
    CPU; None if none did."""
    for source in [*_SOURCES]:
        index = source.index_of(parameter)
        if index is None or source.gave_up(index):
            continue
        # Of all parameters where ranks agree on what they have.
        found = source.collect_one(index) if source.store.alone else source.collect()
        gradients = source.store.agree(found, reading=True)
        if index in gradients:
            found = gradients[index]
            return source.store.states.read(index, GRADIENT) if found is None else found.float().cpu()
    return None

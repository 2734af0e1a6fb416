"""Where a window's gradients are: in ``.grad``, or on the host already.

Both policies read ``.grad`` as the user left it, so that whatever was done to
it counts (accumulated, clipped, unscaled, replaced, set to None).
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from longshore.errors import GradientError, LongshoreError
from longshore.host import ParameterStore
from longshore.optim.clipping import Fingerprint, Seen
from longshore.optim.parameters import ParameterRecord, check_trainable, flat, has_hooks
from longshore.optim.released import ReleasedGradient, ReleasedShard, ReleaseHooks, is_released
from longshore.optim.shards import gradient_part, like


class GradientSource(ABC):
    """How an optimizer finds the gradients of a window."""

    def __init__(self, store: ParameterStore) -> None:
        self.store = store
        self.records: dict[int, ParameterRecord] = {}

    def watch(self, records: Sequence[ParameterRecord]) -> None:
        """Make room on the host for parameters that can get gradients.

        Raises:
            ValueError: one of them has a dtype that cannot be stepped; room was made for none.
        """
        new = [record for record in records if record.index not in self.store]
        for record in new:
            check_trainable(record.parameter, record.name)
        self.store.add_parameters((record.index, record.kept.numel(), record.dtype) for record in new)

    def found(self, record: ParameterRecord, gradient: Tensor) -> Tensor:
        """Check a tensor found in ``.grad``; returns it flat, in the parameter's logical order."""
        record.check_gradient(gradient, same_dtype=self.store.local.transfer.staged)
        return flat(gradient if type(gradient) is Tensor else gradient_part(record.leaf(), gradient))

    @abstractmethod
    def register(self, records: Sequence[ParameterRecord]) -> None:
        """Take up new parameters; where that raises, none of them is taken up."""

    @abstractmethod
    def collect(self) -> dict[int, Tensor | None]:
        """The gradient of each parameter that has one: flat, on the device, or None where the
        store holds it.

        Raises:
            GradientError: one that cannot be counted; nothing was stepped.
        """

    def look_again(self) -> None:
        """Take up parameters that were frozen until now."""
        return

    @property
    def produced(self) -> Mapping[int, int]:
        """Gradients that hooks saw in this window, by parameter."""
        return {}

    def fingerprint(self) -> Fingerprint:
        """The gradients of this window as they are now."""
        return {
            index: Seen(record.name, weakref.ref(gradient), self._changes(index, gradient))
            for index, record in self.records.items()
            if (gradient := record.parameter.grad) is not None
        }

    def _changes(self, index: int, gradient: Tensor) -> int:
        """Grows whenever the gradient changes."""
        return gradient._version

    @abstractmethod
    def consumed(self) -> None:
        """The window was stepped."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Discard the window, with ``.grad`` set to None."""

    @abstractmethod
    def close(self) -> None:
        """Leave the parameters as ordinary ones."""


class KeptGradients(GradientSource):
    """The gradient is ``.grad`` as found at ``step()``; idle means that it is None."""

    def register(self, records: Sequence[ParameterRecord]) -> None:
        self.watch([record for record in records if record.parameter.requires_grad])
        self.records.update((record.index, record) for record in records)

    def collect(self) -> dict[int, Tensor | None]:
        found: dict[int, Tensor | None] = {}
        for index, record in self.records.items():
            gradient = record.parameter.grad
            if gradient is not None:
                found[index] = self.found(record, gradient)
        thawed = [self.records[index] for index in found if index not in self.store]
        if thawed:
            self.watch(thawed)
        return found

    def consumed(self) -> None:
        return

    def zero_grad(self) -> None:
        for record in self.records.values():
            record.parameter.grad = None

    def close(self) -> None:
        return


class ReleasedGradients(GradientSource):
    """Hooks take each gradient to the host during backward and leave a placeholder.

    The host's gradient of a parameter counts exactly while ``.grad`` is the
    placeholder of this window. It is lifted while autograd accumulates.
    """

    def __init__(self, store: ParameterStore) -> None:
        super().__init__(store)
        self._hooks: dict[int, ReleaseHooks] = {}
        # Of one window.
        self._placeholders: dict[int, Tensor] = {}
        self._lifted: set[int] = set()
        self._entered: set[int] = set()
        """Parameters that autograd is accumulating into, as far as their nodes' hooks say."""
        self._produced: dict[int, int] = {}
        # Neither hooks nor placeholders stay on parameters that outlive the optimizer.
        self._finalizer = weakref.finalize(self, _let_go, self._hooks, self._placeholders)
        self._finalizer.atexit = False

    def register(self, records: Sequence[ParameterRecord]) -> None:
        self._hook_trainable(records)
        self.records.update((record.index, record) for record in records)

    def _hook_trainable(self, records: Sequence[ParameterRecord]) -> None:
        """Frozen parameters take no hooks; look again at each step for those that thawed."""
        trainable = [
            record
            for record in records
            if record.parameter.requires_grad and record.index not in self._hooks and record.kept.numel() > 0
        ]
        self.watch(trainable)
        me: weakref.ref[ReleasedGradients] = weakref.ref(self)
        for record in trainable:
            leaf = record.leaf()
            if leaf is None:
                continue  # it was never gathered; whoever gathers it says so
            # The hooks must not refer to the parameter: torch could not collect it.
            index = record.index
            self._hooks[index] = ReleaseHooks(
                record.parameter,
                leaf,
                before=lambda index=index: _call(me, ReleasedGradients._before, index),
                after=lambda index=index: _call(me, ReleasedGradients._after, index),
            )

    def _before(self, index: int) -> None:
        record = self.records[index]
        self._entered.add(index)
        held, gradient = self._resolve(record)
        if not is_released(gradient):
            return
        in_the_way = record.leaf() is record.parameter
        if in_the_way:
            record.parameter.grad = None  # autograd must not add to a placeholder, whosever it is
        if held:
            self._lifted.update([index] if in_the_way else [])
        elif gradient is not self._placeholders.get(index):
            raise _foreign(record)

    def _after(self, index: int) -> None:
        record = self.records[index]
        leaf = record.leaf()
        assert leaf is not None
        gradient, placeholder = leaf.grad, self._placeholders.get(index)
        if gradient is None or (gradient is placeholder and is_released(gradient)):
            return  # a backward that brought nothing here
        if is_released(gradient):
            raise GradientError(
                f"another optimizer with release_gradients=True took the gradient of parameter {record.name}; "
                "give each parameter to one such optimizer only"
            )
        record.check()
        if record.keeps_shard and gradient is not placeholder:
            # FSDP2 wrote it without a word before. Where it is no longer the placeholder, what is held was discarded.
            self._resolve(record)
        if index in self._entered:
            self._entered.discard(index)
        else:
            self._hooks[index].follow(leaf)  # the node that was hooked is no longer the parameter's
        self.store.arrive(index, self.found(record, gradient))
        self._produced[index] = self._produced.get(index, 0) + 1
        self._lifted.discard(index)
        if leaf is not record.parameter:
            leaf.grad = None
            if has_hooks(record.parameter):
                raise GradientError(
                    f"parameter {record.name} has a hook on its gradient, which comes in another tensor where "
                    "parameters are sharded; hook the module (register_full_backward_hook), or use stage 2"
                )
        record.parameter.grad = self._placeholder(record)

    def _placeholder(self, record: ParameterRecord) -> Tensor:
        placeholder = self._placeholders.get(record.index)
        # FSDP2 adds to the shard of a gradient, and puts the sum, which is what arrived, in its place.
        if placeholder is None or not is_released(placeholder):
            kind = ReleasedShard if record.keeps_shard else ReleasedGradient
            placeholder = kind.for_parameter(record.kept, record.name)
            if record.keeps_shard:
                placeholder = like(record.parameter, placeholder)
            self._placeholders[record.index] = placeholder
        return placeholder

    def fail(self, reason: str, failure: BaseException) -> None:
        """A hook failed: the window cannot be stepped."""
        error = GradientError(
            f"a gradient was not taken during backward: {reason} "
            "(zero_grad() discards this window, and training can go on)"
        )
        error.__cause__ = failure
        self.store.fail(error)

    def _resolve(self, record: ParameterRecord) -> tuple[bool, Tensor | None]:
        """Whether the host's gradient counts, and what is in ``.grad``; drops what no longer counts."""
        gradient, index = record.parameter.grad, record.index
        held = self.store.arrivals(index) > 0
        if gradient is not None and gradient is self._placeholders.get(index):
            return held, gradient
        if held and index not in self._lifted:
            # Discarded (None) or replaced by the user's own tensor. The old
            # placeholder must not vouch for what arrives next.
            self.store.discard(index)
            self._placeholders.pop(index, None)
            self._produced.pop(index, None)
            held = False
        return held, gradient

    def collect(self) -> dict[int, Tensor | None]:
        found: dict[int, Tensor | None] = {}
        self.look_again()
        for index, record in self.records.items():
            held, gradient = self._resolve(record)
            if index in self._lifted:
                raise GradientError(
                    f"a backward was interrupted while it accumulated the gradient of parameter {record.name}; "
                    "call zero_grad() to discard this window and go on"
                )
            if held:
                found[index] = None
            elif is_released(gradient):
                raise _foreign(record)
            elif gradient is not None and record.leaf() is not record.parameter:
                raise GradientError(
                    f"the .grad of parameter {record.name}, of which each rank has a shard, was not brought by a "
                    "backward of this engine's model; to set a gradient use longshore.utils.safe_set_full_grad()"
                )
            elif gradient is not None:
                # torch.autograd.grad, .grad assigned by hand, or frozen until now.
                flat_gradient = self.found(record, gradient)
                self.watch([record])
                found[index] = self.store.arrive(index, flat_gradient, by_hook=False)
                if found[index] is None:
                    self._produced[index] = self._produced.get(index, 0) + 1
                    record.parameter.grad = self._placeholder(record)
        return found

    def _changes(self, index: int, gradient: Tensor) -> int:
        if is_released(gradient):
            return self.store.arrivals(index)
        return gradient._version

    def look_again(self) -> None:
        self._hook_trainable(list(self.records.values()))

    @property
    def produced(self) -> Mapping[int, int]:
        return self._produced

    def consumed(self) -> None:
        self._produced.clear()
        self._lifted.clear()
        self._entered.clear()
        self._placeholders.clear()
        for record in self.records.values():
            record.parameter.grad = None

    def zero_grad(self) -> None:
        self.store.discard()
        self.consumed()

    def close(self) -> None:
        self._finalizer()


def _foreign(record: ParameterRecord) -> GradientError:
    return GradientError(
        f"the .grad of parameter {record.name} is a placeholder that does not stand for its gradient of this window: "
        "with release_gradients=True, .grad cannot be saved, moved or shared between optimizers"
    )


def _let_go(hooks: Mapping[int, ReleaseHooks], placeholders: Mapping[int, Tensor]) -> None:
    for index, hook in hooks.items():
        hook.remove(placeholders.get(index))


def _call(source: weakref.ref[ReleasedGradients], hook: object, index: int) -> None:
    """Run a hook of a source that may be gone; no failure is raised into autograd (law 8)."""
    alive = source()
    if alive is None:
        return
    try:
        hook(alive, index)  # pyright: ignore[reportCallIssue]
    except LongshoreError as failure:
        alive.fail(str(failure), failure)
    except BaseException as failure:
        alive.fail(f"parameter {alive.records[index].name}: {type(failure).__name__}: {failure}", failure)
        if not isinstance(failure, Exception):
            raise  # Ctrl-C ends the backward, and the window is incomplete

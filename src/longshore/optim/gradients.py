"""Where a window's gradients are: in ``.grad``, or on the host already.

Both policies read ``.grad`` as the user left it, so that whatever was done to
it counts (accumulated, clipped, unscaled, replaced, set to None).
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from longshore.errors import GradientError, LongshoreError
from longshore.host import HostStore
from longshore.optim.parameters import ParameterRecord, check_trainable
from longshore.optim.released import ReleasedGradient, ReleaseHooks


class GradientSource(ABC):
    """How an optimizer finds the gradients of a window."""

    def __init__(self, store: HostStore) -> None:
        self.store = store
        self.records: list[ParameterRecord] = []

    def watch(self, records: Sequence[ParameterRecord]) -> None:
        """Make room on the host for parameters that can get gradients.

        Raises:
            ValueError: one of them has a dtype that cannot be stepped.
        """
        new = [record for record in records if record.index not in self.store]
        for record in new:
            check_trainable(record.parameter, record.name)
        self.store.add_parameters((record.index, record.parameter.numel(), record.dtype) for record in new)

    def found(self, record: ParameterRecord, gradient: Tensor) -> Tensor:
        """Check a tensor found in ``.grad``; returns it flat, in the parameter's logical order."""
        record.check_gradient(gradient, same_dtype=self.store.transfer.staged)
        return gradient.detach().reshape(-1)

    @abstractmethod
    def register(self, records: Sequence[ParameterRecord]) -> None:
        """Take up new parameters."""

    @abstractmethod
    def collect(self) -> dict[int, Tensor | None]:
        """The gradient of each parameter that has one: flat, on the device, or None where the
        store holds it.

        Raises:
            GradientError: one that cannot be counted; nothing was stepped.
        """

    @abstractmethod
    def fingerprint(self) -> object:
        """Differs whenever a gradient may have changed."""

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
        self.records.extend(records)
        self.watch([record for record in records if record.parameter.requires_grad])

    def collect(self) -> dict[int, Tensor | None]:
        found: dict[int, Tensor | None] = {}
        unfrozen = []
        for record in self.records:
            gradient = record.parameter.grad
            if gradient is not None:
                found[record.index] = self.found(record, gradient)
                unfrozen.append(record)
        self.watch(unfrozen)
        return found

    def fingerprint(self) -> object:
        gradients = [record.parameter.grad for record in self.records]
        return [None if gradient is None else (gradient.data_ptr(), gradient._version) for gradient in gradients]

    def consumed(self) -> None:
        return

    def zero_grad(self) -> None:
        for record in self.records:
            record.parameter.grad = None

    def close(self) -> None:
        return


class ReleasedGradients(GradientSource):
    """Hooks take each gradient to the host during backward and leave a placeholder.

    The host's gradient of a parameter counts exactly while ``.grad`` is the
    placeholder. It is lifted while autograd accumulates.
    """

    def __init__(self, store: HostStore) -> None:
        super().__init__(store)
        self._hooks: dict[int, ReleaseHooks] = {}
        self._placeholders: dict[int, ReleasedGradient] = {}
        self._lifted: set[int] = set()
        self._failure: BaseException | None = None
        self._sealed: str | None = None

    def register(self, records: Sequence[ParameterRecord]) -> None:
        self.records.extend(records)
        self._hook_trainable()

    def _hook_trainable(self) -> None:
        """Frozen parameters take no hooks; look again at each step for those that thawed."""
        trainable = [
            record
            for record in self.records
            if record.parameter.requires_grad and record.index not in self._hooks and record.parameter.numel() > 0
        ]
        self.watch(trainable)
        me: weakref.ref[ReleasedGradients] = weakref.ref(self)
        for record in trainable:
            self._hooks[record.index] = ReleaseHooks(
                record.parameter,
                before=lambda record=record: _call(me, ReleasedGradients._before, record),
                after=lambda record=record: _call(me, ReleasedGradients._after, record),
            )

    def _before(self, record: ParameterRecord) -> None:
        held, gradient = self._resolve(record)
        if isinstance(gradient, ReleasedGradient):
            record.parameter.grad = None
            if held:
                self._lifted.add(record.index)

    def _after(self, record: ParameterRecord) -> None:
        gradient = record.parameter.grad
        if gradient is None:
            return
        if self._sealed is not None:
            raise GradientError(
                f"parameter {record.name} got another gradient after {self._sealed}, which had already measured the "
                "window; run every backward first, or call zero_grad() to discard the window"
            )
        record.check()
        self.store.arrive(record.index, self.found(record, gradient))
        self._lifted.discard(record.index)
        placeholder = self._placeholders.get(record.index)
        if placeholder is None:
            placeholder = ReleasedGradient.for_parameter(record.parameter, record.name)
            self._placeholders[record.index] = placeholder
        record.parameter.grad = placeholder

    def record_failure(self, failure: BaseException) -> None:
        if self._failure is None:
            self._failure = failure

    def _resolve(self, record: ParameterRecord) -> tuple[bool, Tensor | None]:
        """Whether the host's gradient counts, and what is in ``.grad``; drops what no longer counts."""
        gradient = record.parameter.grad
        held = self.store.holds(record.index)
        if gradient is not None and gradient is self._placeholders.get(record.index):
            return held, gradient
        if held and record.index not in self._lifted:
            # Discarded (None) or replaced by the user's own tensor.
            self.store.discard(record.index)
            held = False
        return held, gradient

    def collect(self) -> dict[int, Tensor | None]:
        if self._failure is not None:
            raise GradientError(
                f"a gradient was not taken during backward: {self._failure} "
                "(zero_grad() discards this window, and training can go on)"
            ) from self._failure
        found: dict[int, Tensor | None] = {}
        self._hook_trainable()
        for record in self.records:
            held, gradient = self._resolve(record)
            if record.index in self._lifted:
                raise GradientError(
                    f"a backward was interrupted while it accumulated the gradient of parameter {record.name}; "
                    "call zero_grad() to discard this window and go on"
                )
            if held:
                found[record.index] = None
            elif gradient is not None and not isinstance(gradient, ReleasedGradient):
                # torch.autograd.grad, .grad assigned by hand, or frozen until now.
                found[record.index] = self.found(record, gradient)
                self.watch([record])
        return found

    def seal(self, by: str) -> None:
        """No gradient may arrive any more in this window."""
        self._sealed = by

    def fingerprint(self) -> object:
        return None

    def consumed(self) -> None:
        self._end_window()

    def zero_grad(self) -> None:
        self.store.discard()
        self._end_window()

    def _end_window(self) -> None:
        self._failure = self._sealed = None
        self._lifted.clear()
        for record in self.records:
            record.parameter.grad = None

    def close(self) -> None:
        for hooks in self._hooks.values():
            hooks.remove()
        self._hooks.clear()
        for record in self.records:
            if isinstance(record.parameter.grad, ReleasedGradient):
                record.parameter.grad = None


def _call(source: weakref.ref[ReleasedGradients], hook: object, record: ParameterRecord) -> None:
    """Run a hook of a source that may be gone; no failure is raised into autograd (law 8)."""
    alive = source()
    if alive is None:
        return
    try:
        hook(alive, record)  # pyright: ignore[reportCallIssue]
    except LongshoreError as failure:
        alive.record_failure(failure)
    except BaseException as failure:
        alive.record_failure(GradientError(f"parameter {record.name}: {type(failure).__name__}: {failure}"))
        if not isinstance(failure, Exception):
            raise  # Ctrl-C ends the backward, and the window is incomplete

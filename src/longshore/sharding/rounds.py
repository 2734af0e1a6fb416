"""The gradients that this rank brings to a window: in rounds, one for each backward, or kept until there is a round."""

from __future__ import annotations

import threading
from collections.abc import Callable, KeysView, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longshore.errors import GradientError
from longshore.sharding.layout import Bucket
from longshore.sharding.ownership import Ownership


@dataclass(frozen=True)
class ReductionSettings:
    """How gradients of several ranks become one.

    Attributes:
        bucket_numel: elements that are reduced together.
        each_backward: reduce after every backward (ZeRO-2); otherwise sums stay on the device, and are reduced once
            (stages 0 and 1).
        early: launch buckets while backward goes on; where they are reduced once, while the backward goes on that is
            known to be the last.
        wire_dtype: in which gradients travel; None: in their own.
        sum_dtype: of sums on the device before a reduction.
        predivide: divides gradients before they are added (against overflow in float16); the rest of the mean is
            divided out afterwards.
    """

    bucket_numel: int
    each_backward: bool
    early: bool = True
    wire_dtype: torch.dtype | None = None
    sum_dtype: torch.dtype = torch.float32
    predivide: float = 1.0


class PendingGradients:
    """What one rank brings to the next reduction: gradients by parameter, not reduced yet.

    The first gradient of a parameter is kept as it is, later ones are added in ``dtype`` (law 1).

    Attributes:
        outdated: whether there is more, or less, than what was lent.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._gradients: dict[int, Tensor] = {}
        self._summed: set[int] = set()
        self._lent: set[int] = set()
        self.outdated = False

    @property
    def parameters(self) -> KeysView[int]:
        """The parameters that have a gradient here."""
        return self._gradients.keys()

    @property
    def summed(self) -> bool:
        """Whether any of them is a sum, which its parameter's dtype may not be able to represent."""
        return bool(self._summed)

    def add(self, parameter: int, gradient: Tensor) -> None:
        """Take one more gradient, flat."""
        former, lent = self._gradients.get(parameter), parameter in self._lent
        self.outdated = self.outdated or lent
        if former is None:
            self._gradients[parameter] = gradient
        elif parameter in self._summed and not lent:
            former.add_(gradient.to(self._dtype))  # rounded first, as below: the same bits lent or not
        else:
            # Out of place: the first one may be the user's own tensor, and what was lent is being read.
            self._gradients[parameter] = former.to(self._dtype) + gradient.to(self._dtype)
            self._summed.add(parameter)

    def forget(self, parameter: int) -> None:
        self.outdated = self.outdated or (parameter in self._lent and parameter in self._gradients)
        self._gradients.pop(parameter, None)
        self._summed.discard(parameter)

    def lend(self, parameters: list[int]) -> dict[int, Tensor]:
        """The gradients of these parameters, to be read while they stay here; see :attr:`outdated`."""
        self._lent.update(parameters)
        return {parameter: self._gradients[parameter] for parameter in parameters if parameter in self._gradients}

    def take(self, parameters: list[int]) -> dict[int, Tensor]:
        """Remove the gradients of these parameters and return them."""
        return {parameter: self._gradients.pop(parameter) for parameter in parameters if parameter in self._gradients}


Launch = Callable[["Round", Bucket, dict[int, Tensor]], None]


class Round:
    """The gradients of one backward on their way into buckets: each bucket is reduced exactly once, in an order that
    all ranks share (law 7).

    A bucket is launched when all of its parameters have come and every bucket before it in the order has been launched.
    :meth:`close` launches the rest, without what was not used here.

    Args:
        number: counts the rounds of a window, from 1.
        order: all buckets, in the order in which they are launched.
        launch: called with the bucket and the gradients that came for it.
        early: launch during backward; otherwise everything waits for :meth:`close`.
        lends: the gradients stay where they are until the step.

    Attributes:
        failed: set where the ranks could not meet: what was launched must not run.
        sums: whether any rank's gradients may be sums; known once the ranks met.
        completed: buckets that all of their parameters reached, in the order in which that happened.
    """

    def __init__(
        self, number: int, order: Sequence[Bucket], launch: Launch, early: bool = True, lends: bool = False
    ) -> None:
        self.number = number
        self.lends = lends
        self.failed = False
        self.sums = False
        self.completed: list[int] = []
        self._order = order
        self._launch = launch
        self._early = early
        self._next = 0
        self._missing = {bucket.index: len(bucket.members) for bucket in order}
        self._gradients: dict[int, dict[int, Tensor]] = {bucket.index: {} for bucket in order}

    def take(self, bucket: int, parameter: int, gradient: Tensor) -> bool:
        """Take a gradient along; False where the round has no more room for it.

        Reentrant checkpointing brings a parameter twice within one backward.
        """
        waiting = self._gradients.get(bucket)
        if waiting is None or parameter in waiting:
            return False
        waiting[parameter] = gradient
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            self.completed.append(bucket)
            while self._early and self._next < len(self._order) and self._missing[self._order[self._next].index] == 0:
                self._launch_next()
        return True

    def close(self) -> None:
        """Launch the rest: the backward is over."""
        while self._next < len(self._order):
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self._order[self._next]
        self._next += 1
        self._launch(self, bucket, self._gradients.pop(bucket.index))

    def reduced_all_of(self, pending: Sequence[PendingGradients]) -> bool:
        """Whether this round, which has run, reduced these gradients as they are now."""
        # A sum that arose within that backward (reentrant checkpointing) left in the dtype of its parameter.
        return not self.failed and not any(some.outdated or (some.summed and not self.sums) for some in pending)


class LocalGradients:
    """What this rank brings to a window. Several autograd threads may bring gradients at once.

    ``launch`` starts the reduction of one bucket of a round.
    """

    def __init__(self, ownership: Ownership, settings: ReductionSettings, launch: Launch) -> None:
        # Fixed.
        self._ownership = ownership
        self._window = ownership.window
        self._settings = settings
        self._launch = launch
        self._lock = threading.RLock()
        self._raw_backward: int | None = None
        """The backward that nobody announced (``loss.backward()``) and whose end is waited for."""
        # Planned anew at each agreement.
        self.order: list[int] = []
        """In which buckets are launched, the same on all ranks."""
        self.begin()

    def begin(self) -> None:
        """Begin a new window."""
        self._window.begin()
        self._in_rounds: set[int] = set()
        self._deferred: list[PendingGradients] = []
        self._deferred_open = False
        self._open_stays = False
        """Whether what was kept last came in a backward whose gradients stay on this rank."""
        self._taken = False
        self._round: Round | None = None
        self._closing: Round | None = None
        """The round of the last backward, which reduces what was kept and lets it stay here."""
        self.unsynchronized = False
        """Whether the gradients of the backward under way stay and add up here."""
        self._completed: list[int] = []

    def begin_round(self) -> tuple[Round, list[PendingGradients]]:
        """Begin a backward whose gradients are reduced at once, behind those that were kept."""
        with self._lock:
            self._window.rounds += 1
            self._window.active = None
            self._round = Round(self._window.rounds, self._ordered(), self._launch, self._settings.early)
            return self._round, self.take()[1]

    def may_close(self) -> bool:
        """Whether the backward that begins can be the one in which the whole window is reduced.

        One window has one such backward. If there is one more after all, the reduction was in vain; so the last window
        has to have had no more.
        """
        return (
            self._settings.early
            and self._closing is None
            and not self._taken
            and self._window.backwards >= self._window.usual_backwards
        )

    def begin_closing_round(self) -> tuple[Round, bool]:
        """Begin a backward that is the last, as far as known: buckets are launched with all that the window has for
        them. Also returns whether anything was kept before."""
        with self._lock:
            kept = self._deferred[-1] if self._deferred else self._defer_into_new()

            def launch(current: Round, bucket: Bucket, _: dict[int, Tensor]) -> None:
                self._launch(current, bucket, kept.lend([member.parameter for member in bucket.members]))

            self._closing = self._round = Round(1, self._ordered(), launch, lends=True)
            return self._round, len(kept.parameters) > 0

    def _ordered(self) -> list[Bucket]:
        return [self._ownership.buckets[index] for index in self.order]

    def end_round(self) -> None:
        with self._lock:
            self.unsynchronized = False
            current, self._round = self._round, None
            if current is not None:
                current.close()
                self._completed = current.completed

    def arrive(self, parameter: int, gradient: Tensor, by_hook: bool) -> None:
        """Take one more gradient; ``by_hook``: during a backward."""
        with self._lock:
            self._window.active = None
            self._window.arrivals[parameter] = self._window.arrivals.get(parameter, 0) + 1
            bucket = self._ownership.bucket_of.get(parameter)
            if bucket is None:
                return  # it has no elements
            if self._closing is not None:
                self._defer(parameter, gradient)  # first: the bucket is launched with the sum
                if by_hook and self._round is not None:
                    self._round.take(bucket.index, parameter, gradient)
                return
            if by_hook and self._round is not None and self._round.take(bucket.index, parameter, gradient):
                self._in_rounds.add(parameter)
                return
            raw = by_hook and self._round is None and self._settings.each_backward and not self.unsynchronized
            if raw and self._open_stays:
                self._deferred_open = False  # what stayed on this rank is one reduction, this backward another
            self._open_stays = self.unsynchronized
            self._defer(parameter, gradient)
            if raw:
                self._separate_at_end()

    def _defer(self, parameter: int, gradient: Tensor) -> None:
        (self._deferred[-1] if self._deferred_open else self._defer_into_new()).add(parameter, gradient)

    def _defer_into_new(self) -> PendingGradients:
        self._deferred.append(PendingGradients(self._settings.sum_dtype))
        self._deferred_open = True
        return self._deferred[-1]

    def _separate_at_end(self) -> None:
        """Let what comes behind the backward under way, in whose hook this is called, belong to a round of its own.

        This uses the autograd engine's end-of-backward callback, which is private and is skipped when backward raises;
        with reentrant checkpointing it also comes at the end of each inner backward. So nothing may depend on it but
        which gradients are reduced together.
        """

        def separate() -> None:
            with self._lock:
                self._raw_backward = None
                self._deferred_open = False

        task = torch._C._current_graph_task_id()  # pyright: ignore[reportAttributeAccessIssue]
        if task not in (-1, self._raw_backward):
            self._raw_backward = task
            torch.autograd.Variable._execution_engine.queue_callback(separate)  # pyright: ignore

    def forget(self, parameter: int) -> None:
        """Drop the parameter's gradient, which the user discarded."""
        with self._lock:
            self._window.active = None
            self._window.arrivals.pop(parameter, None)
            for pending in self._deferred:
                pending.forget(parameter)
            if parameter in self._in_rounds:
                self._window.fail(
                    GradientError(
                        "a gradient was taken out of .grad (set to None or replaced) after it had been reduced with "
                        "those of the other ranks; discard the whole window with zero_grad()"
                    )
                )

    def take(self) -> tuple[Round | None, list[PendingGradients]]:
        """Take the round of the last backward, if there was one, and what was kept: one entry for each round that it
        needs."""
        with self._lock:
            closing, self._closing, self._taken = self._closing, None, True
            deferred, self._deferred, self._deferred_open = self._deferred, [], False
            # Reduced from here on: what goes to the other ranks cannot be forgotten here.
            self._in_rounds.update(parameter for pending in deferred for parameter in pending.parameters)
            return closing, deferred

    def planned_order(self) -> list[int]:
        """Buckets that filled up early first: an idle head would hold up every bucket behind it."""
        completed = dict.fromkeys(self._completed)
        return [*completed, *(index for index in self.order if index not in completed)]

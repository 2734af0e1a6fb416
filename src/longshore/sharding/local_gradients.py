"""The gradients that this rank brings to a window: in rounds, or kept until there is a round for them."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from longshore.errors import GradientError
from longshore.sharding.bucket import Bucket
from longshore.sharding.ownership import Ownership
from longshore.sharding.reduction import Launch, PendingGradients, ReductionSettings, Round


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
            return self._round, len(kept) > 0

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
            bucket = self._ownership.bucket_of(parameter)
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
        task = torch._C._current_graph_task_id()  # pyright: ignore[reportAttributeAccessIssue]
        if task not in (-1, self._raw_backward):
            self._raw_backward = task
            torch.autograd.Variable._execution_engine.queue_callback(self._separate)  # pyright: ignore

    def _separate(self) -> None:
        with self._lock:
            self._raw_backward = None
            self._deferred_open = False

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

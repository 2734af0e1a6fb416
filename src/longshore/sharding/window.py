"""The gradients of one window on this rank: in rounds, or kept until there is one for them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from longshore.errors import GradientError
from longshore.sharding.bucket import Bucket
from longshore.sharding.contributions import Contributions
from longshore.sharding.raw_backward import RawBackwards
from longshore.sharding.rounds import Launch, Round
from longshore.sharding.shards import Shards


@dataclass(frozen=True)
class ReductionSettings:
    """How gradients of several ranks become one.

    Attributes:
        bucket_numel: elements that are reduced together.
        each_backward: reduce after every backward (ZeRO-2); otherwise sums
            stay on the device until the step (stages 0 and 1).
        early: launch buckets while backward goes on.
        wire_dtype: in which gradients travel; None: in their own.
        sum_dtype: of sums on the device before a reduction.
        predivide: divides gradients before they are added; the rest of the
            mean is divided out afterwards.
    """

    bucket_numel: int
    each_backward: bool
    early: bool = True
    wire_dtype: torch.dtype | None = None
    sum_dtype: torch.dtype = torch.float32
    predivide: float = 1.0


class WindowGradients:
    """What this rank brings to a window.

    Several autograd threads may bring gradients at once.

    Args:
        shards: the buckets.
        settings: whether each backward is a round, and how sums are kept.
        launch: starts the reduction of one bucket of a round.
    """

    def __init__(self, shards: Shards, settings: ReductionSettings, launch: Launch) -> None:
        # Fixed.
        self._shards = shards
        self._settings = settings
        self._launch = launch
        self._lock = threading.RLock()
        self._raw = RawBackwards(self._separate)
        # Re-planned at each agreement.
        self.order: list[int] = []
        """Of launching buckets, the same on all ranks."""
        self.begin()

    def begin(self) -> None:
        """A new window."""
        self.backwards = 0
        """That began here, whether or not they were rounds."""
        self.rounds = 0
        self.failure: BaseException | None = None
        self.active: list[int] | None = None
        """Parameters with a gradient on any rank, once the ranks agreed on them; None when more came since."""
        self._arrived: dict[int, int] = {}
        self._in_rounds: set[int] = set()
        self._deferred: list[Contributions] = []
        self._deferred_open = False
        self._round: Round | None = None
        self.unsynchronized = False
        """The backward under way is one whose gradients stay and add up here."""
        self._completed: list[int] = []

    def fail(self, failure: BaseException | None) -> None:
        """The window cannot be stepped any more; the first reason counts."""
        self.failure = self.failure or failure

    def arrivals(self, parameter: int) -> int:
        return self._arrived.get(parameter, 0)

    # -- backward -------------------------------------------------------------

    def begin_round(self) -> tuple[Round, list[Contributions]]:
        """A backward begins whose gradients are reduced at once, behind those that were kept."""
        with self._lock:
            self.rounds += 1
            self.active = None
            order = [self._shards.buckets[index] for index in self.order]
            self._round = Round(self.rounds, order, self._launch, self._settings.early)
            return self._round, self._take()

    def end_round(self) -> None:
        with self._lock:
            self.unsynchronized = False
            current, self._round = self._round, None
            if current is not None:
                current.close()
                self._completed = current.completed

    def arrive(self, parameter: int, gradient: Tensor, by_hook: bool) -> None:
        """One more gradient; ``by_hook``: during a backward."""
        with self._lock:
            self.active = None
            self._arrived[parameter] = self._arrived.get(parameter, 0) + 1
            bucket = self._shards.bucket_of(parameter)
            if bucket is None:
                return  # it has no elements
            if by_hook and self._round is not None and self._round.take(bucket.index, parameter, gradient):
                self._in_rounds.add(parameter)
                return
            self._defer(parameter, gradient)
            if by_hook and self._round is None and self._settings.each_backward and not self.unsynchronized:
                self._raw.arrived()

    def _defer(self, parameter: int, gradient: Tensor) -> None:
        if not self._deferred_open:
            self._deferred.append(Contributions(self._settings.sum_dtype))
            self._deferred_open = True
        self._deferred[-1].add(parameter, gradient)

    def _separate(self) -> None:
        """What comes from here on belongs to a round of its own."""
        with self._lock:
            self._deferred_open = False

    def forget(self, parameter: int) -> None:
        """The user discarded the parameter's gradient."""
        with self._lock:
            self.active = None
            self._arrived.pop(parameter, None)
            for contributions in self._deferred:
                contributions.forget(parameter)
            if parameter in self._in_rounds:
                self.fail(
                    GradientError(
                        "a gradient was taken out of .grad (set to None or replaced) after it had been reduced with "
                        "those of the other ranks; discard the whole window with zero_grad()"
                    )
                )

    # -- the end of the window ------------------------------------------------

    def take(self) -> list[Contributions]:
        """What was kept, one entry for each round that it needs."""
        with self._lock:
            return self._take()

    def _take(self) -> list[Contributions]:
        deferred, self._deferred, self._deferred_open = self._deferred, [], False
        return deferred

    def used(self) -> list[bool]:
        """Of all parameters, whether this rank brought a gradient."""
        return [parameter in self._arrived for parameter in self._shards.dtypes]

    def planned_order(self) -> list[int]:
        """Buckets that filled up early first: an idle head would hold up every bucket behind it."""
        completed = dict.fromkeys(self._completed)
        return [*completed, *(index for index in self.order if index not in completed)]

    def buckets_of(self, parameters: set[int]) -> list[Bucket]:
        """The buckets that hold any of these."""
        return [
            bucket
            for bucket in self._shards.buckets
            if any(member.parameter in parameters for member in bucket.members)
        ]

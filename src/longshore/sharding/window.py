"""The gradients of one window on this rank: in rounds, or kept until there is one for them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
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
            stay on the device, and are reduced once (stages 0 and 1).
        early: launch buckets while backward goes on; where they are reduced
            once, while the backward goes on that is known to be the last.
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
        self._usual_backwards = 0
        """Of the last window that was stepped."""
        self.begin()

    def stepped(self) -> None:
        """The window was stepped, and the next begins."""
        self._usual_backwards = self.backwards
        self.begin()

    def begin(self) -> None:
        """A new window."""
        self.backwards = 0
        """That began here, whether or not they were rounds."""
        self.rounds = 0
        self.failure: BaseException | None = None
        self.given_up = False
        """A backward of it raised, and the others are told that it ends with that."""
        self.active: list[int] | None = None
        """Parameters with a gradient on any rank, once the ranks agreed on them; None when more came since."""
        self._arrived: dict[int, int] = {}
        self._in_rounds: set[int] = set()
        self._deferred: list[Contributions] = []
        self._deferred_open = False
        self._open_stays = False
        """What was kept last came in a backward whose gradients stay."""
        self._taken = False
        self._round: Round | None = None
        self.closing: Round | None = None
        """The round of the last backward, in which what was kept is reduced and stays."""
        self.unsynchronized = False
        """The backward under way is one whose gradients stay and add up here."""
        self._completed: list[int] = []

    def fail(self, failure: BaseException | None) -> None:
        """The window cannot be stepped any more; the first reason counts."""
        self.failure = self.failure or failure

    def check_not_given_up(self) -> None:
        """Raises what the backward raised: no other rank meets this one for the step."""
        if self.given_up:
            assert self.failure is not None
            raise self.failure

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

    def may_close(self) -> bool:
        """Whether the backward that begins can be the one in which the whole window is reduced.

        One window has one such backward. If there is one more after all, the
        reduction was in vain; so the last window has to have had no more.
        """
        return (
            self._settings.early
            and self.closing is None
            and not self._taken
            and self.backwards >= self._usual_backwards
        )

    def begin_closing_round(self) -> tuple[Round, bool]:
        """A backward begins that is the last, as far as known: buckets are launched with all that the window has for
        them. Also whether anything was kept before."""
        with self._lock:
            if not self._deferred:
                self._deferred.append(Contributions(self._settings.sum_dtype))
                self._deferred_open = True
            kept = self._deferred[-1]

            def launch(current: Round, bucket: Bucket, _: dict[int, Tensor]) -> None:
                self._launch(current, bucket, kept.lend([member.parameter for member in bucket.members]))

            order = [self._shards.buckets[index] for index in self.order]
            self.closing = self._round = Round(1, order, launch, early=True)
            return self._round, len(kept) > 0

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
            if self.closing is not None:
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
        # Reduced from here on: what goes to the other ranks cannot be forgotten here.
        self._in_rounds.update(parameter for kept in deferred for parameter in kept.parameters)
        self._taken, self.closing = True, None
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


def reduced_early(closing: Round | None, kept: Sequence[Contributions]) -> bool:
    """Whether the round of the last backward reduced all that was kept, as it is; with the lane behind that round."""
    if closing is None or closing.failed:
        return False
    # A sum that arose within that backward (reentrant checkpointing) left in the dtype of its parameter.
    return not any(some.outdated or (some.summed and not closing.sums) for some in kept)

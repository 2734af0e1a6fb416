"""One backward's worth of reductions (law 7): each bucket exactly once, in an order that all ranks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from longshore.sharding.bucket import Bucket

Launch = Callable[["Round", Bucket, dict[int, Tensor]], None]


class Round:
    """The gradients of one backward on their way into buckets.

    A bucket is launched when all of its parameters have come and every bucket
    before it in the order has been launched; what is left is launched by
    :meth:`close`, without what was not used here.

    Args:
        number: counts the rounds of a window, from 1.
        order: all buckets, in the order in which they are launched.
        launch: called with the bucket and the gradients that came for it.
        early: launch during backward; otherwise everything waits for :meth:`close`.
    """

    def __init__(self, number: int, order: Sequence[Bucket], launch: Launch, early: bool) -> None:
        self.number = number
        self.failed = False
        """Set where the ranks could not meet: what was launched must not run."""
        self.sums = False
        """Whether any rank's gradients may be sums; known once the ranks met."""
        self.completed: list[int] = []
        """Buckets that all of their parameters reached, in the order in which that happened."""
        self._order = order
        self._launch = launch
        self._early = early
        self._next = 0
        self._missing = {bucket.index: len(bucket.members) for bucket in order}
        self._gradients: dict[int, dict[int, Tensor]] = {bucket.index: {} for bucket in order}
        self._launched: set[int] = set()

    def take(self, bucket: int, parameter: int, gradient: Tensor) -> bool:
        """Take a gradient along; False where the round has no more place for it.

        Reentrant checkpointing brings a parameter twice within one backward.
        """
        if bucket in self._launched or parameter in self._gradients[bucket]:
            return False
        self._gradients[bucket][parameter] = gradient
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
        self._launched.add(bucket.index)
        self._launch(self, bucket, self._gradients.pop(bucket.index))
        self._gradients[bucket.index] = {}

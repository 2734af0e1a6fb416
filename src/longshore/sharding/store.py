"""One rank's part of an optimizer's state, and the rounds that bring it its gradients."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from longshore.errors import BrokenStateError, GradientError, LongshoreError
from longshore.host import (
    Forecast,
    HostStore,
    ParameterStep,
    Recorder,
    broken_state_error,
    debugging,
)
from longshore.kernels import Scale
from longshore.sharding.action import Action
from longshore.sharding.agreement import Statement, agree_on, check_same
from longshore.sharding.bucket import Bucket
from longshore.sharding.contributions import Contributions
from longshore.sharding.lane import REFUSED
from longshore.sharding.ownership import Ownership
from longshore.sharding.reducer import Reducer
from longshore.sharding.rounds import Round
from longshore.sharding.sharded_state import ShardedState
from longshore.sharding.shards import Shards
from longshore.sharding.steps import PieceForecast, number_of, once_and_more, steps_of_pieces
from longshore.sharding.window import ReductionSettings, WindowGradients, reduced_early


class ShardedStore(ShardedState):
    """A parameter store whose state is spread over ranks.

    Every method that ends in collectives has to be called by all ranks:
    :meth:`end_backward`, :meth:`agree`, :meth:`sum_of_squares`, :meth:`commit`,
    :meth:`read_state` and :meth:`read_gradient`.

    Args:
        inner: holds the pieces that this rank owns, by the index of the piece.
        ownership: which pieces these are, and the lane to the other ranks.
        settings: how gradients are reduced.
    """

    def __init__(self, inner: HostStore, ownership: Ownership, settings: ReductionSettings) -> None:
        super().__init__(inner, Shards(ownership, settings.bucket_numel))
        # Fixed.
        self.transfer = inner.transfer
        self.lane = ownership.lane
        self._settings = settings
        # Grow with parameters.
        self._reducer = Reducer(inner, self.shards, settings)
        # Change with each window.
        self._window = WindowGradients(self.shards, settings, self._launch)
        self._windows = ownership.windows
        self._closed = False

    # -- layout ---------------------------------------------------------------

    def add_parameters(self, parameters: Iterable[tuple[int, int, torch.dtype]]) -> None:
        first = len(self.shards.buckets)
        self.inner.add_parameters(self.shards.add(parameters))
        self._window.order += range(first, len(self.shards.buckets))

    def __contains__(self, parameter: int) -> bool:
        return parameter in self.shards.dtypes

    def record(self, recorder: Recorder) -> None:
        self.inner.record(recorder)
        self.lane.record(recorder)

    # -- gradients of this rank -----------------------------------------------

    def begin_backward(self, reduce: bool, last: bool) -> None:
        self.check_usable()
        if reduce:
            self._ownership.into_backward()
        self._window.backwards += 1
        self._window.unsynchronized = not reduce
        if reduce and self._settings.each_backward:
            current, kept = self._window.begin_round()
            buckets = list(self.shards.buckets)  # step() may add some while the lane is still at this round
            ready, window = self.transfer.mark(), self._windows.number  # which changes when another rank gives up
            self.lane.submit(lambda: self._meet_for(current, window, kept, buckets, ready))
        elif reduce and last and self._window.may_close():
            closing, sums = self._window.begin_closing_round()
            self.lane.submit(lambda: self._meet_to_close(closing, sums))

    def fail(self, failure: BaseException) -> None:
        self._window.fail(failure)

    def end_backward(self, failure: BaseException | None) -> None:
        # Where it failed, its round still takes place: the others are in it.
        self._window.fail(failure)
        self._window.end_round()
        if failure is not None:
            # At once: the others may be in the middle of this backward, where they gather and wait.
            self._window.given_up = self._ownership.interrupted()

    def foresee(self, forecast: Forecast) -> None:
        self.inner.foresee(PieceForecast(forecast, self.shards))

    def expect_backwards(self, backwards: int) -> None:
        self.inner.expect_backwards(backwards if self._settings.each_backward else 1)

    def _meet_for(
        self, current: Round, window: int, kept: list[Contributions], buckets: Sequence[Bucket], ready: Any
    ) -> None:
        try:
            self.lane.meet(Action.BACKWARD, current.number, window)
            rounds = agree_on(self.lane, Statement.of(kept)).deferred
            self._reducer.reduce_kept(kept, rounds, buckets, ready)
        except BaseException:
            current.failed = True
            raise

    def _meet_to_close(self, current: Round, sums: bool) -> None:
        try:
            if not self.lane.meet(Action.CLOSE, current.number, self._windows.number):
                current.failed = True  # another rank is at its step already, and this one will be
                return
            current.sums = any(agree_on(self.lane, Statement([sums])).deferred)
        except BaseException:
            current.failed = True
            raise

    def forward_failed(self) -> None:
        self._ownership.interrupted()

    def arrive(self, parameter: int, gradient: Tensor) -> None:
        self.check_usable()
        self._window.arrive(parameter, gradient, by_hook=True)

    def bring(self, parameter: int, gradient: Tensor) -> Tensor | None:
        self._window.arrive(parameter, gradient, by_hook=False)
        return None

    def arrivals(self, parameter: int) -> int:
        return self._window.arrivals(parameter)

    def reduced(self, parameter: int) -> int | None:
        pieces = self.shards.owned(parameter)
        return min(self.inner.reduced(piece.index) for piece in pieces) if pieces else None

    def discard(self, parameter: int | None = None) -> None:
        self.check_usable()
        if parameter is not None:
            self._window.forget(parameter)
            return
        try:
            self.lane.drain()  # a round that is still to take place belongs to this window, not to the next
        except GradientError:
            pass  # another rank gave up the same window
        finally:
            # Nobody says here that a raw backward raised because another rank gave up.
            if (self._window.failure is not None or self._windows.told) and not self._window.given_up:
                self._ownership.give_up()
            self._windows.discarded()
            self.inner.discard()
            self._window.begin()

    # -- rounds, on the lane --------------------------------------------------

    def _launch(self, current: Round, bucket: Bucket, gradients: dict[int, Tensor]) -> None:
        ready = self.transfer.mark()
        held_bytes = 0  # where gradients stay anyway, nobody waits for memory
        if current is not self._window.closing:
            held_bytes = sum(gradient.numel() * gradient.element_size() for gradient in gradients.values())

        def reduce() -> None:
            if not current.failed:
                with self.transfer.aside(ready):
                    self._reducer.reduce(bucket, gradients, current.sums)
            gradients.clear()  # of a round that did not take place

        self.lane.submit(reduce, held_bytes)

    # -- the end of a window --------------------------------------------------

    def agree(self, collect: Callable[[], dict[int, Tensor | None]]) -> dict[int, Tensor | None]:
        self.check_usable()
        self._window.check_not_given_up()
        failure = self._window.failure
        try:
            if failure is None:
                collect()
        except Exception as error:
            failure = error
        failure = failure or self._window.failure  # collecting may find that a gradient was taken out
        if failure is None and self._window.active is not None:
            return dict.fromkeys(self._window.active, None)  # nothing came since
        closing, kept = self._window.closing, self._window.take()
        parameters, order = list(self.shards.dtypes), self._window.planned_order()
        backwards, used = self._window.backwards, self._window.used()
        ready = self.transfer.mark()

        def settle() -> list[int]:
            self.lane.meet(Action.STEP, len(parameters), self._windows.number)
            early = reduced_early(closing, kept)
            statement = Statement.of(kept, failure is not None, backwards, order, used, early)
            agreed = agree_on(self.lane, statement)
            agreed.check(self.lane.rank, failure, GradientError)
            self._ownership.check_used(parameters, agreed.used_by_rank)
            if debugging():
                agreed.check_backwards()
            self._window.order = list(agreed.order)
            active = [parameter for parameter, anywhere in zip(parameters, agreed.used, strict=True) if anywhere]
            if not agreed.early:
                if closing is not None:
                    self.inner.discard()  # some rank has more, or other gradients than those that were reduced
                self._reducer.reduce_kept(kept, agreed.deferred, self._window.buckets_of(set(active)), ready)
            return active

        try:
            self._ownership.outside_of_the_model(Action.STEP, failure is not None)
            self._window.active = self.lane.run(settle)
        except BaseException as error:
            self._window.fail(error)
            raise
        return dict.fromkeys(self._window.active, None)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            with contextlib.suppress(LongshoreError):  # the first error is the one to raise
                self.lane.run(lambda: self.lane.meet(Action.COMMIT, REFUSED, self._windows.number))
            raise

    def check_same(self, values: Mapping[str, Tensor]) -> None:
        if self._ownership.replicates:
            self.lane.run(lambda: check_same(self.lane, values))

    def sum_of_squares(self, gradients: Mapping[int, Tensor | None], scale: Scale) -> float:
        part, other = (self.inner.sum_of_squares(own, scale) for own in once_and_more(gradients, self.shards))
        # What another rank has too counts once; where it is not finite, on whichever rank, all have to know.
        return self._ownership.total(part if math.isfinite(other) else other)

    def commit(self, steps: Mapping[int, ParameterStep], scale: Scale, then: Callable[[], None] = lambda: None) -> None:
        self.check_usable()
        verdict = number_of(steps, scale)
        self.lane.run(lambda: self.lane.meet(Action.COMMIT, verdict, self._windows.number))
        own = steps_of_pieces(steps, self.shards)
        failure: BaseException | None = None
        try:
            self._ownership.before_publishing()
            self.inner.commit(own, scale)
        except Exception as error:
            failure = error  # the others are told below
        except BaseException as error:
            self.broken = error
            raise
        targets = {parameter: step.target for parameter, step in steps.items()}
        ready = self.transfer.mark()

        def publish() -> None:
            statement = Statement.of([], failure is not None)
            agree_on(self.lane, statement).check(self.lane.rank, failure, BrokenStateError)
            with self.transfer.aside(ready):
                for bucket in self.shards.buckets:
                    active = {member.parameter for member in bucket.members} & targets.keys()
                    if active:
                        self._ownership.publish(bucket, {parameter: targets[parameter] for parameter in active})

        try:
            self.lane.run(publish)
            then()
        except BaseException as error:
            self.broken = failure or error
            raise
        self._windows.applied()
        self._window.stepped()

    # -- state ----------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise LongshoreError(
                "engine.destroy() was called (or close() of its optimizer), so this rank meets the others no more: "
                "read and write optimizer state before it; call initialize() again to train on"
            )

    def check_usable(self) -> None:
        self._check_open()
        self.inner.check_usable()
        if self.broken is not None:
            raise broken_state_error(self.broken, " on this or another rank", " on every rank")

    def _await_rounds(self) -> None:
        """What is on the lane arrives before state is written: each arrival may begin a pass that reads it."""
        try:
            self.lane.drain()
        except LongshoreError as failure:
            self._window.fail(failure)

    def meet(self, loading: bool) -> None:
        self._check_open()
        action = Action.LOAD if loading else Action.SAVE
        self._ownership.outside_of_the_model(action)
        self.lane.run(lambda: self.lane.meet(action, 0, self._windows.number))
        if loading:
            self._await_rounds()

    def _before_writing(self) -> None:
        self._check_open()
        self._await_rounds()

    def begin_load(self) -> None:
        self._await_rounds()
        self.inner.begin_load()
        self.broken = None
        self._window.begin()

    def read_gradient(self, parameter: int) -> Tensor | None:
        """The reduced gradient of the window, from all ranks; after :meth:`agree`."""
        if self._window.active is None or parameter not in self._window.active:
            return None

        def read(piece: int) -> Tensor:
            values = self.inner.read_gradient(piece)
            assert values is not None  # each piece of a parameter that anybody used arrives
            return values

        return self._assemble(parameter, read)

    def close(self) -> None:
        self._closed = True
        self._ownership.close()
        self.lane.close()
        self.inner.close()

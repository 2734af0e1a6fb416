"""Store of one rank, which keeps a share of an optimizer's state and gets its gradients from rounds."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from longshore.errors import BrokenStateError, GradientError, LongshoreError, debugging
from longshore.interrupts import deferred_interrupts
from longshore.kernels import MatrixRule, Scale
from longshore.layout.tiles import Spec
from longshore.ranks.meeting import REFUSED, Action
from longshore.store.agreement import Statement, agreement_of, check_same, verdict_number
from longshore.store.exchange import RankExchange
from longshore.store.ownership import OwnedForecast, SharedOwnership, SharedResidence
from longshore.store.rounds import LocalGradients, ReductionSettings
from longshore.store.store import Store
from longshore.tiles import Breakage, Ended, Forecast, Matrix, ParameterStep, Recorder, Tiles
from longshore.tiles.matrix_exchange import reserve


class ShardedStore(Store):
    """Store whose state is spread over ranks.

    Every method that ends in collectives has to be called by all ranks: :meth:`end_backward`, :meth:`agree`,
    :meth:`sum_of_squares`, :meth:`commit` and :meth:`States.read`.
    """

    def __init__(
        self, tiles: Tiles, ownership: SharedOwnership, residence: SharedResidence, settings: ReductionSettings
    ) -> None:
        super().__init__(tiles, ownership)
        self.residence: SharedResidence = residence
        self.ownership: SharedOwnership = ownership
        self.collectives = ownership.collectives
        self._settings = settings
        self.epoch = ownership.collectives.epoch
        self._gradients = LocalGradients(tiles, ownership, settings)

    def add_parameters(self, specs: Iterable[Spec]) -> None:
        former = len(self.ownership.layout.buckets)
        super().add_parameters(specs)
        self._gradients.order += range(former, len(self.ownership.layout.buckets))

    def set_recorders(self, recorders: Iterable[Recorder]) -> None:
        super().set_recorders(recorders)
        self.collectives.record(functools.partial(self.tiles.recorder.working, "collectives"))

    # -- gradients of this rank -----------------------------------------------

    def _check_not_over(self) -> None:
        """Raise the failure of a window that the other ranks are not in any more: none of them comes to a meeting."""
        if self.window.gave_up or self.collectives.given_up > self.epoch.number:
            self.window.check()

    def begin_backward(self, reduce: bool, last: bool) -> None:
        self.states.check_usable()
        self._check_not_over()
        if reduce:
            self.residence.into_backward()
        self._gradients.begin_backward(reduce, last)

    def end_backward(self, failure: BaseException | None) -> None:
        if failure is not None:
            self.window.fail(failure)
        # If the backward failed, its round still takes place: the others are in it.
        self._gradients.end_backward()
        if failure is not None:
            # At once: the others may wait for this rank, in the middle of this backward or in step().
            self._give_up()
            self.window.gave_up = True

    def foresee(self, forecast: Forecast) -> None:
        super().foresee(OwnedForecast(forecast, self.ownership))

    def expect_backwards(self, backwards: int) -> None:
        self.tiles.expect_backwards(backwards if self._settings.each_backward else 1)

    def arrive(self, parameter: int, gradient: Tensor, *, by_hook: bool = True) -> Tensor | None:
        if by_hook:
            self.states.check_usable()
        self._gradients.arrive(parameter, gradient, by_hook)
        return None

    def arrivals(self, parameter: int) -> int:
        return self._gradients.arrivals.get(parameter, 0)

    def reduced(self, parameter: int) -> int | None:
        elsewhere = parameter in self.ownership.layout.bucket_of and not self.ownership.owned(parameter)
        return None if elsewhere else super().reduced(parameter)

    def forget(self, parameter: int) -> None:
        self.states.check_usable()
        if self._gradients.forget(parameter):
            self.window.fail(
                GradientError(
                    "a gradient was taken out of .grad (set to None or replaced, as model.zero_grad() does) after it "
                    "had been reduced with those of the other ranks; discard the whole window with engine.zero_grad()"
                )
            )

    def discard(self, how: Ended = Ended.DISCARDED) -> None:
        self.states.check_usable()
        told = False
        try:
            self.collectives.drain()  # a round that is still to take place belongs to this window, not to the next
        except GradientError:
            told = True  # another rank gave up the same window
        finally:
            # Checked here, since nothing else notes that a plain loss.backward() raised because another rank gave up.
            window, epoch, collectives = self.window, self.epoch, self.collectives
            lost, collectives.differed = window.lost or epoch.told or collectives.differed, False
            if lost and not window.gave_up:
                self._give_up()
            elif not lost and told:
                epoch.number = max(epoch.number, collectives.given_up)
            collectives.discards += 1  # so it is known whether a window that another rank gave up is a later one
            self.residence.discarded()
            epoch.told = False  # failures from now on belong to another window
            self.tiles.discard()
            window.end(how)

    def _give_up(self) -> None:
        """Note that this rank will discard its window, and tell the others if none of them told this rank.

        They are told at once. One of them may be in :meth:`discard`, where it waits for this rank, which may wait for
        that one in a collective of the script.
        """
        epoch, collectives = self.epoch, self.collectives
        if self.residence.give_up():
            return
        if collectives.given_up > epoch.number:
            epoch.number = collectives.given_up  # another rank told this one, and went on that far
        else:
            epoch.give_up()
            collectives.leave(epoch.number)

    # -- the end of a window --------------------------------------------------

    def ranks_with_raw(self, raw: bool) -> Sequence[int]:
        self.residence.outside_of_the_model(Action.ALONE)
        window, said = self.epoch.number, [int(raw)]
        rows = self.collectives.run(lambda: self.collectives.tell(Action.ALONE, 0, window, said))
        assert rows is not None
        return [rank for rank, (theirs,) in enumerate(rows.tolist()) if theirs]

    def agree(
        self, found: Mapping[int, Tensor | None], failure: BaseException | None = None, *, reading: bool = False
    ) -> Mapping[int, Tensor | None]:
        self.states.check_usable()
        self._check_not_over()
        if not reading:
            self.residence.check_outside_of_gather(Action.STEP)
        window, local = self.window, self._gradients
        closing, kept = local.take()
        layout, order = self.ownership.layout, local.planned_order()
        parameters = list(layout.specs)
        backwards, used = local.backwards, [parameter in local.arrivals for parameter in parameters]
        ready, reduced = local.marks(), local.rounds + local.settled

        def settle() -> list[int]:
            early = closing is not None and closing.reduced_all_of(kept)
            sums, failed = [bool(some.summed) for some in kept], window.failed or failure is not None
            said = Statement(sums, failed, backwards, order, used, early, layout.checksum, reduced)
            rows = self.collectives.tell(Action.STEP, 0, self.epoch.number, said.numbers())
            assert rows is not None
            agreed = agreement_of(rows, said)
            window.check()  # first: what failed in its backwards is the cause
            agreed.check(self.collectives.rank, failure, GradientError)
            agreed.check_reduced()
            self.residence.check_used(parameters, agreed.used_by_rank)
            if debugging():
                agreed.check_backwards()
            local.order = list(agreed.order)
            active = [parameter for parameter, anywhere in zip(parameters, agreed.used, strict=True) if anywhere]
            local.settled += bool(active)
            if not agreed.early:
                if closing is not None:
                    self.tiles.discard()  # some rank has more or other gradients than those that were reduced
                wanted = set(active)
                buckets = [each for each in layout.buckets if each.parameters & wanted]
                local.reduce_pending(kept, agreed.deferred, buckets, ready)
            return active

        try:
            self.residence.outside_of_the_model(Action.STEP, window.failed or failure is not None)
            return dict.fromkeys(self.collectives.run(settle), None)
        except BaseException as error:
            window.fail(error)
            raise
        finally:
            failure = None  # its traceback has this frame: a cycle, with the store in it

    @contextlib.contextmanager
    def preparing(self, same: Mapping[str, Tensor]) -> Iterator[None]:
        try:
            if same and self.ownership.replicates:
                self.collectives.run(lambda: check_same(self.collectives.rows, same))
            yield
        except BaseException:  # Ctrl-C, too: the others would wait
            self._refuse()
            raise

    def _refuse(self) -> None:
        """Tell the other ranks, who are about to commit, that this one cannot."""
        with contextlib.suppress(LongshoreError):  # the first error is the one to raise
            self._meet(Action.COMMIT, REFUSED)

    def _meet(self, action: Action, number: int) -> None:
        self.collectives.run(lambda: self.collectives.meet(action, number, self.epoch.number))

    def sum_of_squares(self, gradients: Mapping[int, Tensor | None], scale: Scale) -> float:
        counted: dict[int, Tensor | None] = {}
        repeated: dict[int, Tensor | None] = {}
        for parameter in gradients:
            for each in self.ownership.owned(parameter):
                (counted if each.counts else repeated)[each.key] = None
        part, other = (self.tiles.sum_of_squares(ranges, scale) for ranges in (counted, repeated))
        # Ranges that several ranks have count once; but if they are not finite on any rank, all ranks have to know.
        return self.ownership.total(part if math.isfinite(other) else other)

    @deferred_interrupts()  # the others step as well
    def commit(self, steps: Mapping[int, ParameterStep], scale: Scale, then: Callable[[], None] = lambda: None) -> None:
        self.states.check_usable()
        exchange = self._exchange_of(steps)
        try:
            self._meet(Action.COMMIT, verdict_number(steps, scale))
        except KeyboardInterrupt as error:  # the others may step
            self.tiles.broken = Breakage.by(error, shared=True)
            raise
        own = {
            each.key: ParameterStep(step.rule, step.target[each.held], None)
            for parameter, step in steps.items()
            for each in self.ownership.owned(parameter)
        }
        failure: BaseException | None = None
        try:
            self.residence.free()
            self.tiles.commit(own, scale, lambda: None, exchange)
        except BaseException as error:
            failure = error  # the others are told below
            if exchange is not None:
                with contextlib.suppress(LongshoreError):  # the first error is the one to raise
                    exchange.abandon()
        ready = self.tiles.streams.marks(())

        def publish() -> None:
            said = Statement(failed=failure is not None)
            agreed = agreement_of(self.collectives.rows(torch.tensor(said.numbers())), said)
            agreed.check(self.collectives.rank, failure, BrokenStateError)
            with self.tiles.streams.aside(ready):
                for bucket in self.ownership.layout.buckets:
                    if active := bucket.parameters & steps.keys():
                        self.ownership.publish(bucket, {parameter: steps[parameter].target for parameter in active})

        try:
            self.collectives.run(publish)
            then()
        except BaseException as error:
            self.tiles.broken = self.tiles.broken or Breakage.by(failure or error, shared=True)
            raise
        finally:
            failure = None  # its traceback has this frame: a cycle, with the store in it
        self.several = self.several or max(self._gradients.arrivals.values(), default=0) > 1
        self.epoch.number += 1
        self.window.end(Ended.STEPPED)

    def _exchange_of(self, steps: Mapping[int, ParameterStep]) -> RankExchange | None:
        """Return the exchange of the matrices of a step; if this rank's device has no memory for that, no rank
        steps."""
        matrices: list[Matrix] = []
        for parameter, step in sorted(steps.items()):
            if isinstance(step.rule, MatrixRule) and parameter in self.ownership.layout.bucket_of:
                matrix = self.ownership.layout.specs[parameter].matrix
                assert matrix is not None
                matrices.append(Matrix(parameter, matrix.layout, step.rule))
        if not matrices:
            return None
        exchange = RankExchange(self.ownership, matrices, self.tiles.streams, self.tiles.recorder)
        try:
            reserve(self.tiles.streams.device, matrices)
        except BaseException:
            self._refuse()
            raise
        return exchange

    def meet(self, loading: bool) -> None:
        self.ownership.check_open()
        action = Action.LOAD if loading else Action.SAVE
        self.residence.check_outside_of_gather(action)
        self.residence.outside_of_the_model(action)
        self._meet(action, 0)
        if loading:
            self.states.before_writing()

    def close(self) -> None:
        self.ownership.closed = True
        self.residence.close()
        self.ownership.close()
        self.collectives.close()
        super().close()

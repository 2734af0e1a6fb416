"""One rank's part of an optimizer's state, and the rounds that bring it its gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longshore.errors import BrokenStateError, GradientError
from longshore.host import HostStore, ParameterStep, ParameterStore, Tile
from longshore.kernels import Scale
from longshore.sharding.agreement import Statement, agree_on
from longshore.sharding.bucket import Bucket, Piece, plan_buckets
from longshore.sharding.contributions import Contributions
from longshore.sharding.lane import Action, CollectiveLane
from longshore.sharding.ownership import Ownership
from longshore.sharding.raw_backward import RawBackwards
from longshore.sharding.reduction import Averaging, reduce_shard
from longshore.sharding.rounds import Round


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


class ShardedStore(ParameterStore):
    """A parameter store whose state is spread over ranks.

    Every method that ends in collectives has to be called by all ranks:
    :meth:`end_backward`, :meth:`agree`, :meth:`sum_of_squares`, :meth:`commit`,
    :meth:`read_state` and :meth:`read_gradient`.

    Args:
        inner: holds the pieces that this rank owns, by the index of the piece.
        lane: the ranks.
        ownership: which pieces these are.
        settings: how gradients are reduced.
    """

    def __init__(
        self, inner: HostStore, lane: CollectiveLane, ownership: Ownership, settings: ReductionSettings
    ) -> None:
        # Fixed.
        self.inner = inner
        self.transfer = inner.transfer
        self.lane = lane
        self._ownership = ownership
        self._settings = settings
        self._averaging = Averaging.over(lane.world_size, settings.predivide)
        # Grow with parameters.
        self._dtypes: dict[int, torch.dtype] = {}
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[int, int] = {}
        self._owned: dict[int, list[Piece]] = {}
        self._next_piece = 0
        # Re-planned at each agreement.
        self._order: list[int] = []
        # Change with each window. Autograd threads bring gradients.
        self._lock = threading.RLock()
        self._broken: BaseException | None = None
        self._raw = RawBackwards(self._separate)
        self._begin_window()

    def _begin_window(self) -> None:
        self._arrived: dict[int, int] = {}
        self._in_rounds: set[int] = set()
        self._reduced: dict[int, int] = {}
        self._deferred: list[Contributions] = []
        self._deferred_open = False
        self._round: Round | None = None
        self._rounds = 0
        self._completed: list[int] = []
        self._failure: BaseException | None = None
        self._active: list[int] | None = None
        """Parameters with a gradient on any rank, once the ranks agreed on them."""

    # -- layout ---------------------------------------------------------------

    def add_parameters(self, parameters: Iterable[tuple[int, int, torch.dtype]]) -> None:
        entries = list(parameters)
        added = plan_buckets(
            entries, self._settings.bucket_numel, self.lane.world_size, len(self.buckets), self._next_piece
        )
        for parameter, _, dtype in entries:
            self._dtypes[parameter] = dtype
            self._owned[parameter] = []
        pieces = []
        for bucket in added:
            self._next_piece += sum(map(len, bucket.pieces))
            self._bucket_of.update((member.parameter, bucket.index) for member in bucket.members)
            for piece in self._ownership.owned(bucket):
                self._owned[piece.parameter].append(piece)
                pieces.append((piece.index, piece.numel, self._dtypes[piece.parameter]))
        self.buckets += added
        self._order += [bucket.index for bucket in added]
        self.inner.add_parameters(pieces)

    @property
    def arrays(self) -> tuple[str, ...]:
        return self.inner.arrays

    def set_states(self, states: Sequence[str]) -> None:
        self.inner.set_states(states)

    def __contains__(self, parameter: int) -> bool:
        return parameter in self._dtypes

    @property
    def tiles(self) -> Sequence[Tile]:
        return self.inner.tiles

    def owned(self, parameter: int) -> Sequence[Piece]:
        """What this rank steps of the parameter."""
        return self._owned[parameter]

    def owners(self, parameter: int) -> tuple[int | None, tuple[tuple[int, int], ...]]:
        """The parameter's bucket, and which ranks step how many of its elements."""
        if parameter not in self._bucket_of:
            return None, ()
        bucket = self.buckets[self._bucket_of[parameter]]
        counts = self._ownership.counts(bucket, parameter)
        return bucket.index, tuple((rank, count) for rank, count in enumerate(counts) if count)

    def host_bytes(self) -> dict[str, int]:
        return self.inner.host_bytes()

    # -- gradients of this rank -----------------------------------------------

    def begin_backward(self, reduce: bool) -> None:
        """A backward begins, on all ranks. ``reduce`` is false where its gradients are to stay here."""
        self.check_usable()
        if not (self._settings.each_backward and reduce):
            return
        self._rounds += 1
        self._active = None
        order = [self.buckets[index] for index in self._order]
        current = Round(self._rounds, order, self._launch, self._settings.early)
        with self._lock:
            deferred, self._deferred, self._deferred_open = self._deferred, [], False
            self._round = current
        ready = self.transfer.mark()
        self.lane.submit(lambda: self._meet_for(current, deferred, ready))

    def end_backward(self, failure: BaseException | None) -> None:
        """The backward is over. Where it failed, its round still takes place: the others are in it."""
        with self._lock:
            current, self._round = self._round, None
            self._failure = self._failure or failure
            if current is not None:
                current.close()
                self._completed = current.completed

    def _meet_for(self, current: Round, deferred: list[Contributions], ready: Any) -> None:
        try:
            self.lane.meet(Action.BACKWARD, current.number)
            rounds = agree_on(self.lane, Statement.of(deferred)).deferred
            self._reduce_deferred(deferred, rounds, self.buckets, ready)
        except BaseException:
            current.failed = True
            raise

    def arrive(self, parameter: int, gradient: Tensor) -> None:
        self.check_usable()
        with self._lock:
            self._active = None
            self._arrived[parameter] = self._arrived.get(parameter, 0) + 1
            bucket = self._bucket_of.get(parameter)
            if bucket is None:
                return  # it has no elements
            if self._round is not None and self._round.take(bucket, parameter, gradient):
                self._in_rounds.add(parameter)
                return
            self._defer(parameter, gradient)
            if self._round is None and self._settings.each_backward:
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

    def bring(self, parameter: int, gradient: Tensor) -> Tensor | None:
        with self._lock:
            self._active = None
            self._arrived[parameter] = self._arrived.get(parameter, 0) + 1
            if parameter in self._bucket_of:
                self._defer(parameter, gradient)
        return None

    def arrivals(self, parameter: int) -> int:
        return self._arrived.get(parameter, 0)

    def reduced(self, parameter: int) -> int | None:
        pieces = self._owned[parameter]
        return min(self.inner.reduced(piece.index) for piece in pieces) if pieces else None

    def discard(self, parameter: int | None = None) -> None:
        self.check_usable()
        with self._lock:
            if parameter is None:
                self._discard_window()
                return
            self._active = None
            self._arrived.pop(parameter, None)
            for contributions in self._deferred:
                contributions.forget(parameter)
            if parameter in self._in_rounds:
                self._failure = self._failure or GradientError(
                    "a gradient was taken out of .grad (set to None or replaced) after it had been reduced with those "
                    "of the other ranks; discard the whole window with zero_grad()"
                )

    def _discard_window(self) -> None:
        if self._failure is not None:
            self.lane.give_up_window()
        try:
            self.lane.drain()
        except GradientError:
            pass  # another rank gave up the same window
        finally:
            self.inner.discard()
            self._begin_window()

    # -- rounds, on the lane --------------------------------------------------

    def _launch(self, current: Round, bucket: Bucket, gradients: dict[int, Tensor]) -> None:
        ready = self.transfer.mark()
        held_bytes = sum(gradient.numel() * gradient.element_size() for gradient in gradients.values())
        own_dtype = self._dtypes[bucket.members[0].parameter]

        def reduce() -> None:
            if not current.failed:
                with self.transfer.aside(ready):
                    self._reduce(bucket, gradients, self._settings.wire_dtype or own_dtype)
            gradients.clear()

        self.lane.submit(reduce, held_bytes)

    def _reduce_deferred(
        self, deferred: list[Contributions], rounds: Sequence[bool], buckets: Sequence[Bucket], ready: Any
    ) -> None:
        """Run agreed rounds on what stayed here; of each round, whether any rank brings sums."""
        for number, summed in enumerate(rounds):
            contributions = deferred[number] if number < len(deferred) else Contributions(torch.float32)
            for bucket in buckets:
                gradients = contributions.take([member.parameter for member in bucket.members])
                own_dtype = self._dtypes[bucket.members[0].parameter]
                dtype = self._settings.wire_dtype or (self._settings.sum_dtype if summed else own_dtype)
                with self.transfer.aside(ready):
                    self._reduce(bucket, gradients, dtype)

    def _reduce(self, bucket: Bucket, gradients: Mapping[int, Tensor], dtype: torch.dtype) -> None:
        reduced = reduce_shard(self.lane, bucket, gradients, dtype, self._averaging)
        for piece, values in self._ownership.arrivals(bucket, reduced):
            self._reduced[piece.index] = self._reduced.get(piece.index, 0) + 1
            self.inner.arrive(piece.index, values)

    # -- the end of a window --------------------------------------------------

    def agree(self, collect: Callable[[], dict[int, Tensor | None]]) -> dict[int, Tensor | None]:
        self.check_usable()
        failure = self._failure
        try:
            collect()
        except Exception as error:
            failure = error
        if failure is None and self._active is not None:
            return dict.fromkeys(self._active, None)  # nothing came since
        with self._lock:
            deferred, self._deferred, self._deferred_open = self._deferred, [], False
        parameters = list(self._dtypes)
        used = [parameter in self._arrived for parameter in parameters]
        statement = Statement.of(deferred, failure is not None, self._rounds, self._planned_order(), used)
        ready = self.transfer.mark()

        def settle() -> list[int]:
            self.lane.meet(Action.STEP, len(parameters))
            agreed = agree_on(self.lane, statement)
            agreed.check(self.lane.rank, failure, GradientError)
            self._order = list(agreed.order)
            active = {parameter for parameter, anywhere in zip(parameters, agreed.used, strict=True) if anywhere}
            buckets = [
                bucket for bucket in self.buckets if any(member.parameter in active for member in bucket.members)
            ]
            self._reduce_deferred(deferred, agreed.deferred, buckets, ready)
            return [parameter for parameter in parameters if parameter in active]

        try:
            self._active = self.lane.run(settle)
            return dict.fromkeys(self._active, None)
        except BaseException as error:
            self._failure = self._failure or error
            raise

    def _planned_order(self) -> list[int]:
        """Buckets that filled up early first: an idle head would hold up every bucket behind it."""
        completed = dict.fromkeys(self._completed)
        return [*completed, *(index for index in self._order if index not in completed)]

    def sum_of_squares(self, gradients: Mapping[int, Tensor | None], scale: Scale) -> float:
        pieces = {piece.index: None for parameter in gradients for piece in self._owned[parameter]}
        return self._ownership.total(self.inner.sum_of_squares(pieces, scale))

    def commit(self, steps: Mapping[int, ParameterStep], scale: Scale, then: Callable[[], None] = lambda: None) -> None:
        self.check_usable()
        own: dict[int, ParameterStep] = {}
        for parameter, step in steps.items():
            for piece in self._owned[parameter]:
                target = step.target[piece.parameter_offset : piece.parameter_offset + piece.numel]
                own[piece.index] = ParameterStep(step.rule, target, None)
        failure: BaseException | None = None
        try:
            self.inner.commit(own, scale)
        except Exception as error:
            failure = error  # the others are told below
        except BaseException as error:
            self._broken = error
            raise
        targets = {parameter: step.target for parameter, step in steps.items()}
        ready = self.transfer.mark()

        def publish() -> None:
            statement = Statement.of([], failure is not None)
            self.lane.meet(Action.PUBLISH, len(steps))
            agree_on(self.lane, statement).check(self.lane.rank, failure, BrokenStateError)
            with self.transfer.aside(ready):
                for bucket in self.buckets:
                    active = {member.parameter for member in bucket.members} & targets.keys()
                    if active:
                        self._ownership.publish(bucket, {parameter: targets[parameter] for parameter in active})

        try:
            self.lane.run(publish)
            then()
        except BaseException as error:
            self._broken = failure or error
            raise
        self._begin_window()

    # -- state ----------------------------------------------------------------

    @property
    def broken(self) -> bool:
        return self._broken is not None or self.inner.broken

    def check_usable(self) -> None:
        self.inner.check_usable()
        if self._broken is not None:
            raise BrokenStateError(
                "an earlier step failed on this or another rank, so some weights were stepped and others were not "
                f"({type(self._broken).__name__}: {self._broken}); load the model's weights and the optimizer's "
                "state (load_state_dict) on every rank before going on"
            ) from self._broken

    def begin_load(self) -> None:
        self.inner.begin_load()
        self._broken = None
        self._begin_window()

    def adopt(self, parameter: int, values: Tensor, *, keep_matching: bool) -> None:
        for piece, part in self._split(parameter, values):
            self.inner.adopt(piece.index, part, keep_matching=keep_matching)

    def count_differing(self, parameter: int, values: Tensor) -> int:
        return sum(self.inner.count_differing(piece.index, part) for piece, part in self._split(parameter, values))

    def _split(self, parameter: int, values: Tensor) -> list[tuple[Piece, Tensor]]:
        return [
            (piece, values[piece.parameter_offset : piece.parameter_offset + piece.numel])
            for piece in self._owned[parameter]
        ]

    def read_state(self, parameter: int, which: str) -> Tensor:
        """A copy of the whole array, from all ranks; every rank has to ask."""
        self.check_usable()
        return self._assemble(parameter, lambda piece: self.inner.read_state(piece, which))

    def read_gradient(self, parameter: int) -> Tensor | None:
        """The reduced gradient of the window, from all ranks; after :meth:`agree`."""
        if self._active is None or parameter not in self._active:
            return None

        def read(piece: int) -> Tensor:
            values = self.inner.read_gradient(piece)
            assert values is not None  # each piece of a parameter that anybody used arrives
            return values

        return self._assemble(parameter, read)

    def _assemble(self, parameter: int, read: Callable[[int], Tensor]) -> Tensor:
        if parameter not in self._bucket_of:
            return torch.empty(0, dtype=torch.float32)
        pieces = [
            [piece for piece in own if piece.parameter == parameter]
            for own in self.buckets[self._bucket_of[parameter]].pieces
        ]
        return self._ownership.assemble(pieces, read)

    def write_state(self, parameter: int, which: str, values: Tensor) -> None:
        for piece, part in self._split(parameter, values):
            self.inner.write_state(piece.index, which, part)

    def clear_state(self, parameter: int) -> None:
        for piece in self._owned.get(parameter, ()):
            self.inner.clear_state(piece.index)

    def close(self) -> None:
        self.lane.close()
        self.inner.close()

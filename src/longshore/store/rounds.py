"""Gradients of this rank in a window: reduced in rounds, one for each backward, or kept until there is a round.

A round reduces each bucket on the collective thread. Every rank sends to each other rank that rank's shard of the
bucket, and adds up its own shard. Gradients are sent in their own dtype and are added in float32, rank by rank in
order. That costs the bytes of a reduce-scatter in the gradients' dtype, and gives the bits of one in float32, the same
in every run.

A bucket is sent in slices; a slice is the same range of every rank's shard. So the buffers are small, stay allocated
and, on the CPU, stay in the cache; and a gradient is freed as soon as its last slice is packed.

With the first slice each rank says for which parameters it has gradients. So a range for which no rank has a gradient
is not an arrival, and zeros of ranks without a gradient are not added.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longshore.layout.layout import Bucket
from longshore.layout.tiles import Range
from longshore.ranks.collective_thread import CollectiveThread
from longshore.ranks.meeting import Action
from longshore.store.agreement import Statement, agreement_of, as_flags, as_words
from longshore.store.ownership import SharedOwnership, SliceEntry, slice_entries, slices
from longshore.tiles import Ended, Tiles

SLICE_NUMEL = 1 << 22
"""Elements of a slice over all ranks, on the CPU."""
DEVICE_SLICE_NUMEL = 1 << 26
"""Elements of a slice on an accelerator, where each costs launches, and no cache is large enough."""
_BLOCK_NUMEL = 1 << 17  # elements that a CPU adds up at a time, so that they stay in its cache


@dataclass(frozen=True)
class ReductionSettings:
    """Settings of how gradients of several ranks are reduced.

    Attributes:
        stage: ZeRO stage, 0, 1, 2 or 3.
        reduced_numel: number of elements that may wait to be reduced together.
        early: launch buckets during backward; if they are reduced once a window, during the backward that is known to
            be the last.
        wire_dtype: dtype in which gradients are sent; None: their own.
        sum_dtype: dtype of sums on the device before a reduction.
        predivide: divides gradients before they are added (against overflow in float16); the rest of the mean is
            divided out afterwards.
    """

    stage: int
    reduced_numel: int
    early: bool = True
    wire_dtype: torch.dtype | None = None
    sum_dtype: torch.dtype = torch.float32
    predivide: float = 1.0

    @property
    def each_backward(self) -> bool:
        """Whether gradients are reduced after every backward; otherwise sums stay on the device, and are reduced once
        for each window."""
        return self.stage >= 2

    @property
    def bucket_numel(self) -> int:
        """Elements of one bucket. During backward one bucket fills while another is reduced; together they have
        ``reduced_numel`` elements."""
        return max(1, self.reduced_numel // 2) if self.early and self.each_backward else self.reduced_numel


def reduce_shard(
    collectives: CollectiveThread,
    bucket: Bucket,
    gradients: dict[int, Tensor],
    dtype: torch.dtype,
    predivide: float,
    read: Callable[[Tensor], None] = lambda gradient: None,
) -> list[tuple[Range, Tensor]]:
    """Reduce a bucket together with all other ranks, in a job of ``collectives``.

    ``gradients`` are this rank's, flat, by parameter. They are sent in ``dtype``, the same on all ranks, and removed
    from the dictionary as they are sent; ``read`` is called with each before it is let go of. Returns the ranges of
    this rank for which any rank has a gradient, each with the mean: float32, flat.
    """
    data, world_size = collectives.data, collectives.world_size
    slice_numel = SLICE_NUMEL if data.device.type == "cpu" else DEVICE_SLICE_NUMEL
    has = as_words([member.parameter in gradients for member in bucket.members])
    has_by_rank: list[set[int]] = []
    # The last offset in a shard, over all ranks, at which each parameter ends; 0 if none of these ranks has a range of
    # it, as may happen with tensor parallelism.
    last = {member.parameter: 0 for member in bucket.members}
    for owned in itertools.chain(*bucket.ranges):
        last[owned.parameter] = max(last[owned.parameter], owned.shard_offset + owned.numel)
    used: dict[int, tuple[Range, Tensor]] = {}
    for start, numel in slices(bucket.shard_numel, world_size, slice_numel):
        by_rank = [slice_entries(ranges, start, numel) for ranges in bucket.ranges]
        outgoing = data.outgoing(world_size * numel * dtype.itemsize)
        for part, entries in zip(outgoing.memory.view(dtype).view(world_size, numel), by_rank, strict=True):
            _pack(part, entries, gradients, 1.0 / predivide)
        for parameter in [parameter for parameter in gradients if last[parameter] <= start + numel]:
            read(gradients.pop(parameter))
        if not has_by_rank:
            for row in data.tell(outgoing, has).tolist():
                flags = as_flags(row, len(bucket.members))
                has_by_rank.append({each.parameter for each, flag in zip(bucket.members, flags, strict=True) if flag})
        if not any(has_by_rank):
            break
        received = [part.view(dtype) for part in data.exchange(outgoing)]
        for entry in by_rank[collectives.rank]:
            parameter = entry.owned.parameter
            arrays = [
                part[entry.in_slice] for part, theirs in zip(received, has_by_rank, strict=True) if parameter in theirs
            ]
            if arrays:
                if entry.owned.key not in used:
                    values = torch.empty(entry.owned.numel, dtype=torch.float32, device=data.device)
                    used[entry.owned.key] = (entry.owned, values)
                add_up(used[entry.owned.key][1][entry.in_range], arrays, predivide / world_size)
    return list(used.values())


def _pack(target: Tensor, entries: Sequence[SliceEntry], gradients: Mapping[int, Tensor], factor: float) -> None:
    for entry in entries:
        gradient = gradients.get(entry.owned.parameter)
        if gradient is not None:
            place = target[entry.in_slice]
            place.copy_(gradient[entry.in_parameter])
            if factor != 1.0:
                place.mul_(factor)


def add_up(target: Tensor, arrays: Sequence[Tensor], factor: float) -> None:
    """Set ``target`` to the sum of ``arrays``, added in order in float32, times ``factor``."""
    numel = target.numel()
    block_numel = _BLOCK_NUMEL if target.device.type == "cpu" else max(1, numel)
    # Adding another dtype in place is several times slower on a CPU than converting it first.
    scratch = torch.empty(min(block_numel, numel), dtype=torch.float32, device=target.device)
    for start in range(0, numel, block_numel):
        block = target[start : start + block_numel]
        block.copy_(arrays[0][start : start + block_numel])
        for array in arrays[1:]:
            addend = array[start : start + block_numel]
            block.add_(addend if addend.dtype == torch.float32 else scratch[: len(addend)].copy_(addend))
        if factor != 1.0:
            block.mul_(factor)


class PendingGradients:
    """Gradients of one rank, by parameter, that are kept for the next reduction.

    The first gradient of a parameter is kept as it is, later ones are added in ``dtype`` (law 1).

    Attributes:
        gradients: flat, by parameter.
        summed: parameters whose gradient is a sum, which their dtype may not be able to represent.
        outdated: whether a gradient of a lent parameter was added or dropped since.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.gradients: dict[int, Tensor] = {}
        self.summed: set[int] = set()
        self._lent: set[int] = set()
        self.outdated = False

    def add(self, parameter: int, gradient: Tensor) -> None:
        """Add one more gradient, flat."""
        former, lent = self.gradients.get(parameter), parameter in self._lent
        self.outdated = self.outdated or lent
        if former is None:
            self.gradients[parameter] = gradient
        elif parameter in self.summed and not lent:
            former.add_(gradient.to(self._dtype))  # rounded first, as below: the same bits lent or not
        else:
            # Added out of place: the first gradient may be the user's own tensor, and a lent one is being read.
            self.gradients[parameter] = former.to(self._dtype) + gradient.to(self._dtype)
            self.summed.add(parameter)

    def forget(self, parameter: int) -> None:
        self.outdated = self.outdated or (parameter in self._lent and parameter in self.gradients)
        self.gradients.pop(parameter, None)
        self.summed.discard(parameter)

    def lend(self, parameters: Iterable[int]) -> dict[int, Tensor]:
        """Return the gradients of these parameters, to be read while they stay here; see :attr:`outdated`."""
        self._lent.update(parameters)
        return {parameter: self.gradients[parameter] for parameter in parameters if parameter in self.gradients}

    def take(self, parameters: Iterable[int]) -> dict[int, Tensor]:
        """Remove the gradients of these parameters and return them."""
        return {parameter: self.gradients.pop(parameter) for parameter in parameters if parameter in self.gradients}


Launch = Callable[["Round", Bucket, dict[int, Tensor]], None]


class Round:
    """The gradients of one backward on their way into buckets: each bucket is reduced exactly once, in an order that
    all ranks share (law 7).

    A bucket is launched when the gradients of all its parameters have arrived and every bucket before it in the order
    has been launched. :meth:`close` launches the rest, even if gradients are missing.

    Args:
        number: number of the round in its window, from 1.
        order: all buckets, in the order in which they are launched.
        launch: called with the round, the bucket and the gradients that arrived for it.
        early: whether to launch during backward; otherwise all buckets wait for :meth:`close`.
        lends: whether the gradients stay in :class:`PendingGradients` until the step.

    Attributes:
        failed: whether the ranks could not meet; launched reductions then must not run.
        sums: whether any rank's gradients may be sums; known once the ranks met.
        completed: buckets for which all gradients arrived, in the order in which they were complete.
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
        """Add a gradient to its bucket; return False for a parameter's second gradient (from reentrant checkpointing)
        or a late one."""
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
        """Launch the remaining buckets at the end of the backward."""
        while self._next < len(self._order):
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self._order[self._next]
        self._next += 1
        self._launch(self, bucket, self._gradients.pop(bucket.index))

    def reduced_all_of(self, pending: Sequence[PendingGradients]) -> bool:
        """Return whether this round, which has run, reduced these gradients as they are now."""
        # A sum that arose within that backward (reentrant checkpointing) was sent in the dtype of its parameter.
        return not self.failed and not any(some.outdated or (some.summed and not self.sums) for some in pending)


class LocalGradients:
    """Gradients of this rank in a window; their means over the ranks arrive in ``tiles``, by owned range.

    Several autograd threads may call :meth:`arrive` at once. Reductions run on the collective thread.

    Attributes:
        backwards: how many backwards began in this window; ``rounds`` of them reduce their gradients at once.
        arrivals: how many gradients arrived on this rank, by parameter.
        settled: how many agreements reduced gradients that were kept until then.
    """

    def __init__(self, tiles: Tiles, ownership: SharedOwnership, settings: ReductionSettings) -> None:
        # These are fixed.
        self._tiles = tiles
        self._ownership = ownership
        self._collectives = ownership.collectives
        self._epoch = ownership.collectives.epoch
        self._settings = settings
        self._lock = threading.RLock()
        self._raw_backward: tuple[int, weakref.ref[Any]] | None = None
        """A backward that was not announced (a plain ``loss.backward()``) and has not ended: autograd's id of it, and
        what autograd keeps as long as it is under way."""
        # This is planned anew at each agreement.
        self.order: list[int] = []
        """Indices of buckets in the order of launches, the same on all ranks."""
        self._usual_backwards = 0
        """How many backwards the last stepped window had."""
        self._begin()
        tiles.window.on_end(self._ended)

    def _begin(self) -> None:
        """Begin a new window."""
        self.backwards = 0
        self.rounds = 0
        self.settled = 0
        self.arrivals: dict[int, int] = {}
        self._in_rounds: set[int] = set()
        self._deferred: list[PendingGradients] = []
        self._deferred_open = False
        self._open_stays = False
        """Whether the gradient kept last is from a backward whose gradients stay on this rank."""
        self._taken = False
        self._round: Round | None = None
        self._closing: Round | None = None
        """The round of the last backward, which reduces the kept gradients and leaves them here until the step."""
        self._unsynchronized = False
        """Whether the gradients of the backward under way stay on this rank and are added up."""
        self._completed: list[int] = []
        self._streams: set[Any] = set()
        """Streams of the device on which gradients arrived."""

    def _ended(self, how: Ended) -> None:
        if how is Ended.STEPPED:
            self._usual_backwards = self.backwards
        self._begin()

    def marks(self) -> Any:
        """Return how far each stream is that had gradients in this window; see :meth:`CopyStreams.marks`."""
        with self._lock:
            return self._tiles.streams.marks(self._streams)

    # -- backwards, from the caller's thread ----------------------------------

    def begin_backward(self, reduce: bool, last: bool) -> None:
        """Begin a backward. ``reduce``: whether its gradients are reduced; ``last``: whether it is the window's last,
        as far as known."""
        self.backwards += 1
        self._unsynchronized = not reduce
        if reduce and self._settings.each_backward:
            self._begin_round()
        elif reduce and last and self._may_close():
            self._begin_closing_round()

    def _begin_round(self) -> None:
        """Queue the meeting that opens the backward's round, and the reduction of gradients kept before it."""
        with self._lock:
            self.rounds += 1
            current = self._round = Round(self.rounds, self._ordered(), self._launch, self._settings.early)
            pending = self.take()[1]
        ready = self.marks()
        # Read now: the one changes when another rank gives up, the other as the buckets do.
        window, layout = self._epoch.number, self._ownership.layout

        def meet() -> None:
            said = Statement([bool(some.summed) for some in pending], layout=layout.checksum)
            rows = self._collectives.tell(Action.BACKWARD, current.number, window, said.numbers())
            assert rows is not None
            self.reduce_pending(pending, agreement_of(rows, said).deferred, layout.buckets, ready)

        self._open(current, meet)

    def _may_close(self) -> bool:
        """Return whether the whole window can be reduced in the backward that begins.

        If another backward follows, the reduction was wasted. So the last window must not have had more backwards.
        """
        return (
            self._settings.early
            and self._closing is None
            and not self._taken
            and self.backwards >= self._usual_backwards
        )

    def _begin_closing_round(self) -> None:
        """Queue the meeting that opens the round of the last backward: buckets are launched with all gradients that the
        window has for them."""
        with self._lock:
            kept = self._deferred[-1] if self._deferred else self._defer_into_new()
            sums = len(kept.gradients) > 0  # new gradients will be added to the kept ones

            def launch(current: Round, bucket: Bucket, _: dict[int, Tensor]) -> None:
                self._launch(current, bucket, kept.lend(bucket.parameters))

            closing = self._closing = self._round = Round(1, self._ordered(), launch, lends=True)
            window, layout = self._epoch.number, self._ownership.layout  # read now, as in _begin_round()

        def meet() -> None:
            said = Statement([sums], layout=layout.checksum)
            rows = self._collectives.tell(Action.CLOSE, closing.number, window, said.numbers())
            if rows is None:
                closing.failed = True  # another rank is at its step already, and this one soon will be
            else:
                closing.sums = any(agreement_of(rows, said).deferred)

        self._open(closing, meet)

    def _open(self, current: Round, meet: Callable[[], None]) -> None:
        def job() -> None:
            try:
                meet()
            except BaseException:
                current.failed = True
                raise

        self._collectives.submit(job)

    def _ordered(self) -> list[Bucket]:
        return [self._ownership.layout.buckets[index] for index in self.order]

    def _launch(self, current: Round, bucket: Bucket, gradients: dict[int, Tensor]) -> None:
        """Queue the reduction of one bucket of a round."""
        ready = self.marks()
        # Gradients that stay until the step free no memory here, so the hook need not wait for them.
        waiting_bytes = 0 if current.lends else sum(gradient.nbytes for gradient in gradients.values())

        def reduce() -> None:
            if not current.failed:
                self.reduce(bucket, gradients, current.sums, ready)
            gradients.clear()  # also if the round did not take place

        self._collectives.submit(reduce, waiting_bytes)

    def end_backward(self) -> None:
        with self._lock:
            self._unsynchronized = False
            current, self._round = self._round, None
            if current is not None:
                current.close()
                self._completed = current.completed

    # -- reductions, in jobs of the collective thread -------------------------

    def reduce_pending(
        self, pending: list[PendingGradients], rounds: Sequence[bool], buckets: Sequence[Bucket], ready: Any
    ) -> None:
        """Run agreed rounds on gradients that were kept; ``rounds`` says for each whether any rank has sums."""
        for number, summed in enumerate(rounds):
            some = pending[number] if number < len(pending) else PendingGradients(torch.float32)
            for bucket in buckets:
                self.reduce(bucket, some.take(bucket.parameters), summed, ready)

    def reduce(self, bucket: Bucket, gradients: dict[int, Tensor], sums: bool, ready: Any) -> None:
        """Reduce one bucket once ``ready`` is reached. ``sums``: some of the gradients, of any rank, may be sums, which
        their parameter's dtype may not be able to represent."""
        dtype = bucket.dtype
        if sums:  # a dtype that can represent both, so that no bit depends on which rank has a sum
            dtype = torch.promote_types(dtype, self._settings.sum_dtype)
        dtype, collectives = self._settings.wire_dtype or dtype, self._ownership.averaging_collectives
        streams, predivide = self._tiles.streams, self._settings.predivide
        with streams.aside(ready):
            reduced = reduce_shard(collectives, bucket, gradients, dtype, predivide, streams.read_aside)
            for owned, values in self._ownership.spread(bucket, reduced):
                self._tiles.arrive(owned.key, values)

    # -- gradients, from any thread -------------------------------------------

    def arrive(self, parameter: int, gradient: Tensor, by_hook: bool) -> None:
        """Take one more gradient; ``by_hook``: whether a hook brings it during a backward."""
        with self._lock:
            self.arrivals[parameter] = self.arrivals.get(parameter, 0) + 1
            self._streams.add(self._tiles.streams.stream())
            bucket = self._ownership.layout.bucket_of.get(parameter)
            if bucket is None:
                return  # the parameter has no elements
            if self._closing is not None:
                self._defer(parameter, gradient)  # first: the bucket is launched with the sum
                if by_hook and self._round is not None:
                    self._round.take(bucket.index, parameter, gradient)
                return
            if by_hook and self._round is not None and self._round.take(bucket.index, parameter, gradient):
                self._in_rounds.add(parameter)
                return
            raw = by_hook and self._round is None and self._settings.each_backward and not self._unsynchronized
            if raw and self._open_stays:
                self._deferred_open = False  # gradients that stayed here are reduced apart from this backward's
            if raw:
                self._separate_raw_backwards()
            self._open_stays = self._unsynchronized
            self._defer(parameter, gradient)

    def _defer(self, parameter: int, gradient: Tensor) -> None:
        (self._deferred[-1] if self._deferred_open else self._defer_into_new()).add(parameter, gradient)

    def _defer_into_new(self) -> PendingGradients:
        self._deferred.append(PendingGradients(self._settings.sum_dtype))
        self._deferred_open = True
        return self._deferred[-1]

    def _separate_raw_backwards(self) -> None:
        """Let the gradients of the backward under way, and those that arrive after it, belong to rounds of their own.
        Called in a hook.

        The autograd engine's end-of-backward callback is private; with reentrant checkpointing it also comes at the end
        of each inner backward. So it may affect only which gradients are reduced together. It is skipped when backward
        raises, but autograd lets go of it then.
        """
        task, former = torch._C._current_graph_task_id(), self._raw_backward  # pyright: ignore[reportAttributeAccessIssue]
        if task == -1 or (former is not None and former[0] == task):
            return
        if former is not None and former[1]() is None:
            self._deferred_open = False

        def separate() -> None:
            with self._lock:
                self._raw_backward = None
                self._deferred_open = False

        self._raw_backward = task, weakref.ref(separate)
        torch.autograd.Variable._execution_engine.queue_callback(separate)  # pyright: ignore

    def forget(self, parameter: int) -> bool:
        """Drop the parameter's gradient, which the user discarded. Return whether it was reduced by then with those of
        the other ranks, so that the window is lost."""
        with self._lock:
            self.arrivals.pop(parameter, None)
            for pending in self._deferred:
                pending.forget(parameter)
            return parameter in self._in_rounds

    def take(self) -> tuple[Round | None, list[PendingGradients]]:
        """Remove and return the round of the last backward, if there was one, and the kept gradients: one entry for
        each round that they need."""
        with self._lock:
            closing, self._closing, self._taken = self._closing, None, True
            deferred, self._deferred, self._deferred_open = self._deferred, [], False
            # These count as reduced from here on: a gradient that goes to other ranks cannot be dropped here.
            self._in_rounds.update(parameter for pending in deferred for parameter in pending.gradients)
            return closing, deferred

    def planned_order(self) -> list[int]:
        """Return the order of launches, with the buckets that filled up first at its front: a first bucket that never
        fills would delay all others."""
        completed = dict.fromkeys(self._completed)
        return [*completed, *(index for index in self.order if index not in completed)]

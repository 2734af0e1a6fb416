"""The one thread that calls all collectives of an engine, in order (law 7), and the process groups that they use.

Ranks meet over gloo, on the CPU, also if their tensors are on a device: a meeting never waits for work of the device,
and a rank that ends is seen at once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from longshore.accelerator import make_current
from longshore.errors import GradientError, RankError
from longshore.ranks.data_plane import DataPlane
from longshore.ranks.device_collectives import DeviceCollectives
from longshore.ranks.meeting import (
    NOTE_NUMEL,
    Action,
    Epoch,
    Meeting,
    Row,
    Uncounted,
    different_parameters,
    explain_difference,
)
from longshore.ranks.twin_groups import Twins
from longshore.ranks.waiting import all_gather_single, communicating, let_go, missing, notice_s, wait_for
from longshore.transfer.runner import Worker

T = TypeVar("T")

_PATIENCE_S = 1.0

_LOGGER = logging.getLogger("longshore")


class CollectiveThread:
    """Thread that runs the collectives of one group of ranks, one after the other.

    Every sequence of collectives begins with :meth:`meet`, in which each rank announces its next action, and goes on
    with :meth:`rows`, in which it announces how much it will send. All of these messages have one size. So ranks that
    do different things get an error at once: they do not wait for each other, and no collective gets other sizes than
    it expects, which would end the process.

    Args:
        groups: process groups of the ranks, used by this thread alone; :meth:`close` ends them.
        device: device on which communicated tensors have to be.
        limit_bytes: how many bytes of gradients may wait for their bucket's turn.
        modules: names of the modules that are gathered, by number.
        within: thread of a group that has all of these ranks, whose collectives of a device are watched together.

    Attributes:
        epoch: number of this rank's window.
        gives_up: whether this rank gave up its window and the others may not know; the next meeting tells them.
        differed: whether the ranks met for different things, so that all of them give up their windows.
        given_up: number of the window that another rank went on to when it gave one up; set when a meeting raises for
            that.
        discards: how many windows this rank discarded; after a meeting for the same, as many as any rank did.
        on_device: ends collectives of an accelerator that wait for a rank that has ended.
        notes: the note that each rank added in the last meeting, by rank.
        data: moves tensors, in jobs.
        uncounted: may be that of another thread, if the same ranks meet there.
    """

    def __init__(
        self,
        groups: Twins,
        device: torch.device,
        limit_bytes: int,
        modules: Sequence[str] = (),
        within: CollectiveThread | None = None,
    ) -> None:
        # These are fixed.
        self._modules = modules
        self._within = within
        self.rank: int = dist.get_rank(groups.control)
        self.world_size: int = dist.get_world_size(groups.control)
        self.groups: Twins | None = groups
        # A hook that blocks holds up backward, in which another rank may wait for this one (SyncBatchNorm) while its
        # own buckets wait for the end of that backward (an idle head). So memory is limited, but nobody waits forever.
        begin = functools.partial(make_current, device)
        self._worker = Worker(limit_bytes, begin, "longshore-collectives", patience_s=_PATIENCE_S)
        # These are set once.
        self._dead: RankError | None = None
        self._failed = False
        self._closing = threading.Event()
        # These change with each window.
        self.epoch = Epoch()
        self.gives_up = False
        self._gave_up_at = 0
        """What ``discards`` was then."""
        self.differed = False
        self.given_up = 0
        self._said = ""
        """What that meeting said."""
        self.discards = 0
        self.uncounted = Uncounted()
        self._left = False
        """Whether the last meeting that another rank left ended this rank's window, too."""
        # These change with each meeting. The first is also read by the thread that waits for a job.
        self._meeting: Meeting | None = None
        self._latest: Any = None
        """Handle of the last exchange of rows that began."""
        self._of_latest: tuple[Tensor, ...] = ()
        """The tensors of that exchange."""
        self._last_met = "when the engine was made"
        self._last_action = Action.STEP
        self.notes: list[Sequence[int]] = []
        self._ranks = dist.get_process_group_ranks(groups.control)
        missing(self._ranks)  # from here on the others hear of this rank
        self.on_device = DeviceCollectives() if within is None else within.on_device
        began = functools.partial(self.on_device.began, ranks=self._ranks)
        self.data = DataPlane(groups.data, device, self.rows, self._communicating, self._wait_for, began)

    # -- jobs, from any thread ------------------------------------------------

    def record(self, working: Callable[[], AbstractContextManager[None]]) -> None:
        """Run each job from here on in the context that ``working`` returns."""
        self._worker.working = working

    def submit(self, job: Callable[[], None], waiting_bytes: int = 0, awaited: bool = True) -> None:
        """Queue ``job``, for which ``waiting_bytes`` of gradients wait; block for a while if these exceed the limit.

        ``awaited``: whether :meth:`drain` waits for it although no other job follows.
        """

        def guarded() -> None:
            if self._dead is not None:
                raise self._dead
            try:
                job()
                self.on_device.check()
            except BaseException:
                self._failed = True
                raise

        self._worker.submit(guarded, waiting_bytes, awaited)

    def drain(self) -> None:
        """Wait for every job; raise the error of the first that failed. Log a warning if other ranks do not come."""
        while not self._worker.idle_within(notice_s()):
            self.warn_of_waiting()
        failure = self._worker.drain()
        if failure is None:
            return
        try:
            if failure is self._dead:
                # Each caller gets an error of its own: raised again and again, the same one would collect tracebacks.
                raise RankError(str(failure)) from failure.__cause__
            raise failure
        finally:
            del failure  # its traceback has this frame: a cycle, with the store in it

    def run(self, job: Callable[[], T]) -> T:
        """Run ``job`` after all others and return its result; if one of them failed, raise its error instead."""
        self.drain()
        results: list[T] = []
        self.submit(lambda: results.append(job()))
        self.drain()
        return results[0]

    def warn_of_waiting(self) -> None:
        """Log, once for each meeting, that the other ranks do not come. Any thread may call this."""
        meeting = self._meeting
        if meeting is None or meeting.told or (waited_s := time.monotonic() - meeting.since) < notice_s():
            return
        meeting.told = True
        others = [str(rank) for rank in range(self.world_size) if rank != self.rank]
        missing = "of which at least one is not there" if len(others) > 1 else "which is not there"
        _LOGGER.warning(
            f"rank {self.rank} is {meeting.doing} and has waited {waited_s:.0f} s for rank {', '.join(others)}, "
            f"{missing}; all ranks last met {self._last_met}"
        )

    @contextlib.contextmanager
    def _communicating(self) -> Iterator[None]:
        try:
            with communicating(self._ranks):
                yield
        except RankError as dead:
            self._dead = dead
            raise

    def _gone(self) -> Sequence[int]:
        return missing(self._ranks)

    def _wait_for(self, work: Any) -> None:
        with self._communicating():
            wait_for(work, None, self._gone)

    def give_up(self) -> None:
        """Note that this rank gave up a window, which it will count in :attr:`discards`: see :attr:`gives_up`."""
        self.gives_up, self._gave_up_at = True, self.discards

    @property
    def _is_clean(self) -> bool:
        """Whether each job did all of its collectives."""
        return not self._failed and self._dead is None

    def close(self) -> None:
        self._closing.set()
        if self._dead is None:
            self._worker.close()
        self.data.close()
        if self._within is None:
            self.on_device.close()
        if self.groups is not None and dist.is_initialized():
            # Collectives of this group may also run in jobs of the thread of all ranks.
            self.groups.end(self._is_clean and (self._within is None or self._within._is_clean))
            # After an error no other rank comes to the last meeting, and the group's threads wait until its timeout.
            let_go((self.groups.control, self._of_latest), self._latest)
            # These are usually the last references: threads and sockets end now, not at a garbage collection.
            self.groups, self._latest, self._of_latest = None, None, ()

    # -- meetings, from jobs --------------------------------------------------

    def meet(self, action: Action, number: int, window: int, note: Sequence[int] = ()) -> bool:
        """Wait until all ranks are at ``action`` number ``number`` of the same window.

        ``window`` is :attr:`Epoch.number`. Afterwards :attr:`notes` has each rank's ``note``. At CLOSE a rank
        need not find the others: if one of them is at another action, the result is False, and that rank waits for the
        next meeting.

        Raises:
            GradientError: another rank gave up the window, or came to COMMIT with REFUSED.
            RankError: the ranks do different things; the message has the action of each.
        """
        return self.finish(self.begin(action, number, window, note))

    def begin(
        self, action: Action, number: int, window: int, note: Sequence[int] = (), discards: int | None = None
    ) -> Meeting:
        """Come to a meeting without waiting, which :meth:`finish` does; one meeting at a time. See :meth:`meet`."""
        if action in (Action.BACKWARD, Action.CLOSE) and window < self.given_up:
            raise GradientError(self._said)  # it was told at a backward before this one in the queue
        window += 0 if action is Action.TELL else self.uncounted.windows
        row = Row(action, number, window, self.discards if discards is None else discards, note=note)
        meeting = Meeting(row, row.words(self._modules, window=True))
        self._come(meeting)
        return meeting

    def _come(self, meeting: Meeting) -> None:
        row = meeting.row
        if row.action is not Action.TELL:
            row.gave_up, self.gives_up = self.gives_up, False
            if row.action is not Action.LEAVE:
                row.discards = self._gave_up_at if row.gave_up else self.discards
        meeting.rows, meeting.work = self._gather_rows(torch.tensor(row.numbers(), dtype=torch.int64))

    def finish(self, meeting: Meeting) -> bool:
        """Wait for the others; see :meth:`meet`."""
        own, action = meeting.row, meeting.row.action
        while True:
            meeting.since = time.monotonic()
            self._meeting = meeting
            try:
                with self._communicating():
                    wait_for(meeting.work, self._closing if action is Action.LEAVE else None, self._gone)
                meeting.work = None  # a reference, as in the traceback of an error, would keep sockets open
                if action is Action.LEAVE and self._closing.is_set():
                    return True
                numbers = meeting.rows.view(self.world_size, -1).tolist()
            finally:
                self._meeting = None
            rows = [Row.received(each) for each in numbers]
            if action is Action.LEAVE:
                # A rank that left a window which this one had discarded by then heard nothing of the one that this
                # rank leaves now: it goes on in that one, unless it is told again.
                before = [row.window for row in rows if row.action is action and row.discards < own.discards]
                behind = max(before, default=0) - (own.window - 1)
                if behind <= 0:
                    return True
                self.uncounted.windows += behind
                own.window += behind
                self._come(meeting)
                continue
            self._last_met = meeting.doing
            self.notes = [row.note for row in rows]
            left = [rank for rank, row in enumerate(rows) if row.action is Action.LEAVE]
            gave_up = left or [rank for rank, row in enumerate(rows) if row.gave_up]
            if all(row.reason == own.reason for row in rows):
                if action is not Action.TELL:
                    self._last_action, self.discards = action, max(self.discards, *(row.discards for row in rows))
                return True
            behind = max((rows[rank].window for rank in gave_up), default=0) - own.window
            discarded = all(rows[rank].discards < own.discards for rank in gave_up)
            if action is not Action.TELL and gave_up and behind >= 0 and discarded:
                # This rank discarded the same windows; where a script does that on all ranks, nobody is left behind.
                self.uncounted.windows += behind
                own.window += behind
                self._come(meeting)
                continue
            if not gave_up:
                closing = [row.action is Action.CLOSE for row in rows]
                if not any(closing) or all(closing):
                    self.differed = True
                    explain_difference(rows, self.rank, self._modules)
                    return True  # this rank refused, and has an error of its own
                if action is Action.CLOSE:
                    return False
            elif left or not own.gave_up:
                self._left = bool(left)
                self.given_up = max(rows[rank].window for rank in gave_up) - self.uncounted.windows
                self._said = f"rank {gave_up[0]} failed in this window and discarded it; call zero_grad() and go on"
                raise GradientError(self._said)
            # The ranks at other actions have been told, and come to this meeting next.
            self._come(meeting)

    def leave(self, window: int, unless_told: bool = False) -> None:
        """Tell all ranks that this one gave up its window and goes on to ``window``, after the jobs under way.

        This rank does not wait for that: the others may come to their next meeting only when this rank has gone on.

        ``unless_told``: not if one of them told this rank by then in the same way.
        """
        discards = self.discards

        def job() -> None:
            told, self._left = self._left, False
            if told and unless_told:
                return
            self.finish(self.begin(Action.LEAVE, 0, window, discards=discards))

        self.submit(job, awaited=False)

    def tell(self, action: Action, number: int, window: int, numbers: Sequence[int]) -> Tensor | None:
        """Meet as in :meth:`meet`, and tell the other ranks these ``numbers``, as many as each of them tells.

        Returns every rank's numbers, int64 ``[world_size, len(numbers)]``; None where ``meet()`` is False.
        """
        fits = len(numbers) < NOTE_NUMEL
        note = [len(numbers), *numbers] if fits else [len(numbers)]
        if not self.meet(action, number, window, note):
            return None
        counts, notes = {note[0] for note in self.notes}, [note[1:] for note in self.notes]
        if len(counts) > 1:
            raise different_parameters(action.words)
        if fits:
            return torch.tensor(notes)[:, : len(numbers)]
        return self._gathered(torch.tensor(numbers)).view(self.world_size, -1)

    # -- collectives, from jobs -----------------------------------------------

    def rows(self, row: Tensor, during: Action | None = None) -> Tensor:
        """Return every rank's ``row``, stacked, on the CPU: shape ``[world_size, *row.shape]``.

        ``during``: the action of the ranks; None: that of their last meeting. Raises the errors of :meth:`meet`.
        """
        said = row.detach().cpu().contiguous().view(-1).view(torch.uint8)
        note = torch.zeros(8 * NOTE_NUMEL, dtype=torch.uint8)
        fits = said.numel() <= note.numel()
        if fits:
            note[: said.numel()] = said
        doing = self._last_action if during is None else during
        self.meet(Action.TELL, said.numel(), doing, note.view(torch.int64).tolist())
        if fits:
            found = torch.tensor(self.notes, dtype=torch.int64).view(torch.uint8)[:, : said.numel()]
        else:
            found = self._gathered(said)
        return found.reshape(-1).view(row.dtype).view(self.world_size, *row.shape)

    def _gathered(self, row: Tensor) -> Tensor:
        rows, work = self._gather_rows(row)
        self._wait_for(work)
        return rows

    def _gather_rows(self, row: Tensor) -> tuple[Tensor, Any]:
        rows = torch.empty(self.world_size * row.numel(), dtype=row.dtype)
        with self._communicating():
            assert self.groups is not None
            self._latest = all_gather_single(rows, row, self.groups.control)
            self._of_latest = rows, row
        return rows, self._latest

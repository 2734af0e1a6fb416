"""How FSDP2 gathers parameters where longshore steps them: in meetings, so that no rank gathers what others do not."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from longshore.errors import GradientError
from longshore.sharding.action import Action
from longshore.sharding.groups import twin_of
from longshore.sharding.lane import CollectiveLane
from longshore.sharding.segments import NOTE_NUMEL, Segment, SharedSegments
from longshore.sharding.window_count import WindowCount

_LOOK_S = 1.0
"""How often a rank looks whether it waits for others."""


class GatheringLane:
    """Meetings of ranks that gather parameters.

    Two modules of a model are often of one size. Then ranks would gather each
    other's weights and not know; and where one rank leaves a module out, the
    others would wait for it.

    Args:
        group: the ranks. Gathering has a lane of its own, and does not wait for gradients that are on their way.
        device: of the parameters.
        names: of the modules, by number.
        windows: of this rank.
    """

    def __init__(self, group: Any, device: torch.device, names: Sequence[str], windows: WindowCount) -> None:
        def words(action: Action, number: int) -> str:
            return f"{action.words} of {names[number]}" if action is Action.GATHER else action.words

        # Words between hosts: with a device's own backend each would wait for the device.
        twin = twin_of(group, device, backend="gloo")
        self._lane = CollectiveLane(
            twin, torch.device("cpu"), limit_bytes=1, owns_group=True, words=words, note_numel=NOTE_NUMEL
        )
        self._windows = windows
        self._underway: Gathered | None = None
        self._segments = SharedSegments(self._lane.rank, self._lane.rows)
        self._closing = threading.Event()
        threading.Thread(target=_watch, args=(self._lane, self._closing), name="longshore-watch", daemon=True).start()

    def of(self, number: int) -> Gathering:
        """What gathers the parameters of module ``number``."""
        return Gathering(self, number)

    def meet(self, action: Action) -> None:
        """All ranks are at this action; raises what :meth:`CollectiveLane.meet` does."""
        self._finish_underway()
        # On the thread that waits for the result: two more threads to wake would take as long as the meeting.
        with self._hearing():
            self._lane.meet(action, 0, self._windows.number)

    @contextlib.contextmanager
    def _hearing(self) -> Iterator[None]:
        try:
            yield
        except GradientError:
            self._windows.hear(self._lane.given_up)
            raise

    def allocate(self, num_bytes: int) -> tuple[Segment, Tensor] | None:
        """uint8 ``[num_bytes]`` for what is gathered next, and what to give to :meth:`gather`; None: anywhere."""
        return self._segments.lend(num_bytes, held=True)

    def gather(self, module: int, output: Tensor | None, segment: Segment | None) -> Gathered:
        """All ranks gather the same module.

        Nothing is waited for but what was under way: ranks may be late for each other by a module.

        Args:
            module: its number.
            output: part ``k``, of ``world_size`` equal ones, will come from rank ``k``; this rank's own is there.
                None: it is on a device.
            segment: where it is, if it was allocated here.
        """
        self._finish_underway()
        said = self._segments.come(segment)
        window = self._windows.number
        meeting = self._lane.begin(Action.GATHER, module, window, said)

        def finish() -> None:
            self._underway = None
            try:
                with self._hearing():
                    self._lane.finish(meeting)
            except BaseException:
                self._segments.stand_apart()
                raise
            if output is None or self._segments.met(self._lane.notes):
                return
            if segment is not None:
                # A part that is another rank's is not this one's to write. Whoever holds the tensor sees other memory.
                output.set_(output.clone())  # pyright: ignore
            self._lane.complete(output.view(self._lane.world_size, -1).view(torch.uint8))

        self._underway = Gathered(finish, lambda: self._windows.number == window)
        return self._underway

    def _finish_underway(self) -> None:
        if self._underway is None:
            return
        try:
            self._underway.wait()
        except GradientError:
            if not self._lane.gives_up:  # otherwise both discard, and this rank knows that it does
                raise

    def give_up(self) -> None:
        """At the next meeting others, if they are elsewhere, are told that this rank gave up its window."""
        self._lane.give_up_window()
        self._segments.stand_apart()

    def interrupted(self) -> None:
        """What this rank gathers next is for another window."""
        self._segments.stand_apart()
        with contextlib.suppress(GradientError):  # another one gave up, too
            self._finish_underway()
        if self._windows.give_up():
            # Now, and not at the next meeting: before that, this rank waits for gradients of a backward in which
            # the others wait to gather with it.
            meeting = self._lane.begin(Action.LEAVE, 0, self._windows.number)
            self._underway = Gathered(lambda: self._left(meeting), lambda: True)

    def _left(self, meeting: Any) -> None:
        self._underway = None
        self._lane.finish(meeting)

    def close(self) -> None:
        self._closing.set()
        self._segments.close()
        self._lane.close()


def _watch(lane: CollectiveLane, closing: threading.Event) -> None:
    while not closing.wait(_LOOK_S):
        lane.tell_of_waiting()


class Gathered(dist.Work):
    """A module's parameters on their way; :meth:`wait` says so, or raises what kept them.

    Args:
        finish: waits for them.
        wanted: whether the forward or backward that they are for still goes on.
    """

    def __init__(self, finish: Callable[[], None], wanted: Callable[[], bool]) -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish
        self._wanted = wanted
        self._failure: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """``timeout``: that of the group holds."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            try:
                finish()
            except BaseException as failure:
                self._failure = failure
                raise
        elif self._failure is not None and self._wanted():
            raise self._failure
        return True


class Gathering(DefaultAllGather):
    """Gathers one module's parameters."""

    def __init__(self, lane: GatheringLane, number: int) -> None:
        self._lane = lane
        self._number = number
        self._segment: Segment | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._segment = None
        num_bytes = math.prod(map(int, size)) * dtype.itemsize
        if device.type == "cpu" and num_bytes > 0 and (found := self._lane.allocate(num_bytes)) is not None:
            self._segment, memory = found
            return memory.view(dtype).view(*size)
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if output_tensor.device.type != "cpu":
            self._lane.gather(self._number, None, None).wait()
            return super().__call__(output_tensor, input_tensor, group, async_op)
        own = output_tensor.view(group.size(), -1)[group.rank()]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        return self._lane.gather(self._number, output_tensor, self._segment)

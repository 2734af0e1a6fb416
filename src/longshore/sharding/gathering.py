"""How FSDP2 gathers parameters where longshore steps them: in meetings, so that no rank gathers what others do not."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from longshore.sharding.lane import Action, CollectiveLane, twin_of
from longshore.sharding.segments import SharedSegments

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
    """

    def __init__(self, group: Any, device: torch.device, names: Sequence[str]) -> None:
        def words(action: Action, number: int) -> str:
            return f"{action.words} of {names[number]}" if action is Action.GATHER else action.words

        # Words between hosts: with a device's own backend each would wait for the device.
        twin = twin_of(group, device, backend="gloo")
        self._lane = CollectiveLane(twin, torch.device("cpu"), limit_bytes=1, owns_group=True, words=words)
        self._interruptions = 0
        self._segments = SharedSegments(self._lane.rank, self._lane.rows)
        self._closing = threading.Event()
        threading.Thread(target=_watch, args=(self._lane, self._closing), name="longshore-watch", daemon=True).start()

    def of(self, number: int) -> Gathering:
        """What gathers the parameters of module ``number``."""
        return Gathering(self, number)

    def meet(self, action: Action) -> None:
        """All ranks are at this action; raises what :meth:`CollectiveLane.meet` does."""
        # On the thread that waits for the result: two more threads to wake would take as long as the meeting.
        self._lane.meet(action, 0, self._interruptions)

    def allocate(self, num_bytes: int) -> tuple[int, Tensor] | None:
        """uint8 ``[num_bytes]`` for what is gathered next, and a number to give to :meth:`gather`; None: anywhere."""
        return self._segments.lend(num_bytes, held=True)

    def gather(self, module: int, rows: Tensor | None, segment: int | None) -> None:
        """All ranks gather the same module. Row ``k`` of ``rows`` (uint8, in host memory; None: they are on a device)
        then comes from rank ``k``; this rank's own is there. ``segment``: where they are, of those allocated here."""
        self._lane.meet(Action.GATHER, module, self._interruptions, -1 if segment is None else segment)
        segments = self._lane.notes
        if rows is None:
            return
        if not self._segments.met(segments):
            self._lane.complete(rows)
            return
        for rank, row in enumerate(rows):
            if rank != self._lane.rank:
                row.copy_(self._segments.of(rank, segments[rank], rank * len(row), len(row)))

    def give_up(self) -> None:
        """At the next meeting others, if they are elsewhere, are told that this rank gave up its window."""
        self._lane.give_up_window()

    def interrupted(self) -> None:
        """What this rank gathers next is for another forward."""
        self.give_up()
        self._interruptions += 1

    def close(self) -> None:
        self._closing.set()
        self._segments.close()
        self._lane.close()


def _watch(lane: CollectiveLane, closing: threading.Event) -> None:
    while not closing.wait(_LOOK_S):
        lane.tell_of_waiting()


class Gathering(DefaultAllGather):
    """Gathers one module's parameters."""

    def __init__(self, lane: GatheringLane, number: int) -> None:
        self._lane = lane
        self._number = number
        self._segment: int | None = None

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
            self._lane.gather(self._number, None, None)
            return super().__call__(output_tensor, input_tensor, group, async_op)
        rows = output_tensor.view(group.size(), -1)
        own = rows[group.rank()]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        self._lane.gather(self._number, rows.view(torch.uint8), self._segment)
        return None

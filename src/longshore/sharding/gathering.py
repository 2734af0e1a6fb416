"""How FSDP2 gathers parameters where longshore steps them: in meetings, so that no rank gathers what others do not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from longshore.sharding.lane import Action, CollectiveLane, twin_of


class GatheringLane:
    """Meetings of ranks that gather parameters.

    Two modules of a model are often of one size. Then ranks would gather each
    other's weights and not know; and where one rank leaves a module out, the
    others would wait for it.

    Args:
        lane: the ranks. This one is beside it: gathering does not wait for gradients that are on their way.
        names: of the modules, by number.
    """

    def __init__(self, lane: CollectiveLane, names: Sequence[str]) -> None:
        def words(action: Action, number: int) -> str:
            return f"{action.words} of {names[number]}" if action is Action.GATHER else action.words

        # Words between hosts: with a device's own backend each would wait for the device.
        group = twin_of(lane.group, lane.device, backend="gloo")
        self._lane = CollectiveLane(group, torch.device("cpu"), limit_bytes=1, owns_group=True, words=words)
        self._interruptions = 0

    def of(self, number: int) -> Gathering:
        """What gathers the parameters of module ``number``."""
        return Gathering(self, number)

    def meet(self, action: Action, number: int = 0) -> None:
        """All ranks are at this action; raises what :meth:`CollectiveLane.meet` does."""
        self._lane.run(lambda: self._lane.meet(action, number, self._interruptions))

    def complete(self, rows: Tensor) -> None:
        """Row ``k`` comes from rank ``k``, in host memory."""
        self._lane.run(lambda: self._lane.complete(rows))

    def give_up(self) -> None:
        """At the next meeting others, if they are elsewhere, are told that this rank gave up its window."""
        self._lane.give_up_window()

    def interrupted(self) -> None:
        """What this rank gathers next is for another forward."""
        self.give_up()
        self._interruptions += 1

    def close(self) -> None:
        self._lane.close()


class Gathering(DefaultAllGather):
    """Gathers one module's parameters."""

    def __init__(self, lane: GatheringLane, number: int) -> None:
        self._lane = lane
        self._number = number

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._lane.meet(Action.GATHER, self._number)
        if output_tensor.device.type != "cpu":
            return super().__call__(output_tensor, input_tensor, group, async_op)
        rows = output_tensor.view(group.size(), -1)
        if rows[group.rank()].data_ptr() != input_tensor.data_ptr():
            rows[group.rank()].copy_(input_tensor)
        self._lane.complete(rows.view(torch.uint8))
        return None

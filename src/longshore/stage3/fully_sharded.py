"""ZeRO-3: where the store has gradients from, and parameters to, while torch's FSDP2 (``fsdp.py``) gathers them.

FSDP2 decides when parameters are gathered and prefetched. longshore takes the gradient of the gathered parameter where
autograd accumulates it, before FSDP2 would reduce it. So gradients at stage 3 are handled as at stage 2: they are
reduced in rounds, counted, and added in float32 in the order of the ranks, and unused parameters are known as such.
FSDP2 finds no gradient left to reduce, and its own reduction (which needs every parameter used on every rank, and
rounds to the parameters' dtype) never runs.

Parameters are gathered in meetings, so that all ranks gather the same.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from longshore.errors import GradientError, LongshoreError
from longshore.layout.layout import Bucket, Grid, Layout
from longshore.ranks.collective_thread import CollectiveThread
from longshore.ranks.data_plane import SharedBlock, SharedMemory
from longshore.ranks.meeting import Action, Epoch
from longshore.ranks.twin_groups import Twins, twin_of, twins_of
from longshore.stage3.fsdp import CopiesOfShards, FullyShardedModel
from longshore.store.ownership import SharedOwnership, SharedResidence

_LOOK_S = 1.0
"""Seconds between a rank's checks of whether it waits for others."""


class GridOwnership(SharedOwnership):
    """Ownership at stage 3: each rank steps its shards of the model's ``parameters`` (by index; it may grow)."""

    replicates = False

    def __init__(
        self,
        collectives: CollectiveThread,
        model: FullyShardedModel,
        parameters: Mapping[int, Tensor],
        bucket_numel: int,
    ) -> None:
        grid = Grid(
            model.grid,
            collectives.rank,
            lambda index: model.layout_of(parameters[index]),
            lambda index: model.group_of[id(parameters[index])],
        )
        super().__init__(collectives, Layout(grid, bucket_numel))
        if model.grid.tp_size > 1:
            # All ranks meet on one thread, and take the same verdict there. Gradients are reduced in its jobs, over
            # this group.
            assert collectives.groups is not None
            device = collectives.data.device
            groups = twins_of(collectives.groups.data, device, ranks=grid.data_ranks)
            self.averaging_collectives = CollectiveThread(groups, device, limit_bytes=1, within=collectives)

    def assemble_values(self, parameter: int, held: Tensor) -> Tensor:
        if not any(self.layout.stepped_by_rank(parameter)):
            return torch.empty(0, dtype=torch.float32)
        return self._from_ranks(parameter, "values", [held.float()])  # of frozen ones too, which no rank steps

    def publish(self, bucket: Bucket, targets: Mapping[int, Tensor]) -> None:
        return

    def close(self) -> None:
        if self.averaging_collectives is not self.collectives:
            with contextlib.suppress(Exception):  # the caller that waited for these jobs got their failure
                self.collectives.drain()  # its jobs use the group that is closed next
            self.averaging_collectives.close()


class FullySharded(SharedResidence):
    """Residence of the model's ``parameters`` (by index) at stage 3: shards, which are gathered for each use."""

    def __init__(
        self, collectives: CollectiveThread, model: FullyShardedModel, parameters: Mapping[int, Tensor]
    ) -> None:
        self.collectives = collectives
        self._model = model
        self._parameters = parameters
        self._left_at = -1
        """Number of the window to which this rank went on when it told the others last that it gave one up."""
        device, epoch = collectives.data.device, collectives.epoch
        self._gathers = GatherMeetings(model.shard_group, device, model.module_names, epoch, collectives)
        self._gathers_with_all = model.grid.shards == collectives.world_size
        if self._gathers_with_all:
            # This rank hears of the same windows in both, first in one or the other, and counts each of them once.
            collectives.uncounted = self._gathers.uncounted
        model.gather_by(lambda number: ModuleGather(self._gathers, number, model.copies))

    def is_whole(self, parameter: int) -> bool:
        return id(self._parameters[parameter]) in self._model.whole

    def check_handles(self) -> None:
        self._model.handles.check()

    def check_outside_of_gather(self, action: Action) -> None:
        if self._model.whole:
            raise LongshoreError(
                f"this rank is {action.words} inside gather(), where parameters are whole; leave the block first"
            )

    def outside_of_the_model(self, action: Action, failed: bool = False) -> None:
        self._model.check_kept()
        if failed:
            self._gathers.give_up()  # others may still be in the model, where they would wait for this rank
        try:
            self._gathers.meet(action)
        except GradientError:
            self._tell_others()
            raise

    def into_backward(self) -> None:
        self._model.align_before_backward()
        # If another rank's forward raised after its last gather, this rank was not told of it in its own forward, and
        # that rank is not in this backward. A round would wait for it, while it waits for the same ranks in its next
        # forward.
        try:
            self._gathers.meet(Action.BACKWARD)
        except BaseException:
            self.give_up()
            raise

    def check_used(self, parameters: Sequence[int], by_rank: Sequence[Sequence[bool]]) -> None:
        grid = self._model.grid
        for place, parameter in enumerate(parameters):
            using = [each for each in range(grid.tp_size) if any(by_rank[rank][place] for rank in grid.alike(each))]
            if 0 < len(using) < grid.tp_size:
                raise GradientError(
                    f"parameter {self._model.names[id(self._parameters[parameter])]} has a gradient on rank "
                    f"{', '.join(map(str, grid.alike(using[0])))}, and none on the other ranks of tensor parallelism; "
                    "these have to run the same backwards on the same data"
                )

    def interrupted(self, trains: bool) -> bool:
        self.give_up()  # the others may wait in the model
        return False

    def give_up(self) -> bool:
        self._gathers.interrupted()
        self._tell_others()
        self._model.reset()
        return True

    def discarded(self) -> None:
        self._gathers.discarded()
        self._model.discarded = True

    def _tell_others(self) -> None:
        """Tell ranks that gather apart from this one that the window was given up, once: after the rounds under way."""
        if self._gathers_with_all:
            self.collectives.give_up()  # all ranks gather together, and are told there
            return
        # The next meeting would be too late: with tensor parallelism, this rank waits for the others in its next
        # forward, and they for this one in step(); other replicas may wait for this rank in zero_grad(), and this one
        # for them in a collective of the script. Each rank comes to one meeting to tell, or is told in it.
        number, collectives = self.collectives.epoch.number, self.collectives
        if number != self._left_at:
            self._left_at = number
            collectives.leave(number, unless_told=True)

    def free(self) -> None:
        self._model.reshard()

    def close(self) -> None:
        self._model.close()
        self._gathers.close()


class GatherMeetings:
    """Meetings of ranks that gather parameters.

    Two modules of a model often have the same size. Without meetings, ranks in different modules would gather each
    other's weights unnoticed, and where one rank leaves out a module, the others would wait for it.

    Args:
        group: process group of the ranks. Gathering uses a twin of it, so as not to wait for gradients under way.
        device: device of the parameters.
        names: names of the modules, by number.
        epoch: number of this rank's window.
        within: collectives over all ranks of the engine.

    Attributes:
        shared: memory for gathered parameters.
        uncounted: as in :class:`CollectiveThread`.
    """

    def __init__(
        self,
        group: Any,
        device: torch.device,
        names: Sequence[str],
        epoch: Epoch,
        within: CollectiveThread | None = None,
    ) -> None:
        # Meetings go over gloo: with a device's own backend each would wait for the device.
        twin = twin_of(group, device, backend="gloo")
        twins = Twins(twin, twin)
        self._collectives = CollectiveThread(twins, torch.device("cpu"), limit_bytes=1, modules=names, within=within)
        self.uncounted = self._collectives.uncounted
        self._epoch = epoch
        self._underway: GatherWork | None = None
        self.shared = SharedMemory(self._collectives.rank, self._collectives.rows)
        self._closing = threading.Event()
        watched = (self._collectives, self._closing)
        threading.Thread(target=_watch, args=watched, name="longshore-watch", daemon=True).start()

    def meet(self, action: Action) -> None:
        """Wait until all ranks are at this action; raise the errors of :meth:`CollectiveThread.meet`."""
        self._finish_underway()
        # This runs in the thread that waits for the result: waking two more threads would take as long as the meeting.
        self._finish(self._collectives.begin(action, 0, self._epoch.number))

    def _finish(self, meeting: Any) -> None:
        try:
            self._collectives.finish(meeting)
        except GradientError:
            self._epoch.hear(self._collectives.given_up)
            raise

    def gather(self, module: int, output: Tensor | None, block: SharedBlock | None) -> GatherWork:
        """Gather the parameters of the module with this number, the same one on all ranks.

        This waits for the gather under way and for nothing else: ranks may be one module apart. ``output`` has
        ``world_size`` equal parts: part ``k`` will come from rank ``k``, and this rank's own is already there.
        ``output`` may be in a ``block`` of :attr:`shared`; it is None for parameters on a device.
        """
        self._finish_underway()
        said = self.shared.come(block)
        window = self._epoch.number
        meeting = self._collectives.begin(Action.GATHER, module, window, said)

        def finish() -> None:
            self._underway = None
            try:
                self._finish(meeting)
            except BaseException:
                self.shared.withdraw()
                raise
            if output is None or self.shared.met(self._collectives.notes):
                return
            if block is not None:
                # This rank must not write other ranks' parts of shared memory: the tensor gets memory of its own.
                output.set_(output.clone())  # pyright: ignore
            self._collectives.data.complete(output.view(self._collectives.world_size, -1).view(torch.uint8))

        self._underway = GatherWork(finish, lambda: self._epoch.number == window)
        return self._underway

    def began(self, group: Any, work: Any, device: torch.device) -> dist.Work:
        """Note that an accelerator gathers parameters for this thread; return the handle."""
        ranks = dist.get_process_group_ranks(group)
        return self._collectives.on_device.began(group, work, device, ranks, raises=True)

    def _finish_underway(self) -> None:
        if self._underway is None:
            return
        try:
            self._underway.wait()
        except GradientError:
            if not self._collectives.gives_up:  # otherwise both ranks discard their windows, and this one knows it
                raise

    def discarded(self) -> None:
        """See :meth:`SharedResidence.discarded`."""
        self._collectives.discards += 1

    def give_up(self) -> None:
        """Tell the others at the next meeting, if they are at another action, that this rank gave up its window."""
        self._collectives.give_up()
        self.shared.withdraw()

    def interrupted(self) -> None:
        """Note that a forward or backward raised: this rank's next gather is for another window."""
        self.shared.withdraw()
        with contextlib.suppress(GradientError):  # another rank gave up, too
            self._finish_underway()
        if self._epoch.give_up():
            # The others are told now, and not at the next meeting: before that, this rank waits for gradients of a
            # backward in which the others wait to gather with it.
            meeting = self._collectives.begin(Action.LEAVE, 0, self._epoch.number)

            def finish() -> None:
                self._underway = None
                self._collectives.finish(meeting)

            self._underway = GatherWork(finish, lambda: True)

    def close(self) -> None:
        self._closing.set()
        self.shared.close()
        self._collectives.close()


def _watch(collectives: CollectiveThread, closing: threading.Event) -> None:
    while not closing.wait(_LOOK_S):
        collectives.warn_of_waiting()


class GatherWork(dist.Work):
    """Handle of a gather under way. :meth:`wait` returns when the parameters are there, or raises the error.

    Args:
        finish: waits for the parameters.
        wanted: whether the forward or backward that they are for still goes on.
    """

    def __init__(self, finish: Callable[[], None], wanted: Callable[[], bool]) -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish
        self._wanted = wanted
        self._failure: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for as long as the group's own timeout allows; ``timeout`` is not read."""
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


class ModuleGather(DefaultAllGather):
    """FSDP2's all-gather for one module's parameters, which gathers in meetings."""

    def __init__(self, meetings: GatherMeetings, number: int, copies: CopiesOfShards) -> None:
        self._meetings = meetings
        self._number = number
        self._copies = copies
        self._block: SharedBlock | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._block = None
        num_bytes = math.prod(map(int, size)) * dtype.itemsize
        if device.type == "cpu" and num_bytes and (found := self._meetings.shared.lend(num_bytes, held=True)):
            self._block, memory = found
            return memory.view(dtype).view(*size)
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if output_tensor.device.type != "cpu":
            self._copies.began(output_tensor.device)
            self._meetings.gather(self._number, None, None).wait()
            work = super().__call__(output_tensor, input_tensor, group, async_op=True)
            assert work is not None
            watched = self._meetings.began(group, work, output_tensor.device)
            if async_op:
                return watched
            watched.wait()  # the current stream does
            return None
        own = output_tensor.view(group.size(), -1)[group.rank()]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        return self._meetings.gather(self._number, output_tensor, self._block)

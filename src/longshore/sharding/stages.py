"""What each ZeRO stage means: who steps what, when gradients are reduced, and what it adds to the schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longshore.host.events import ARRIVE, COPY_TO_HOST, NORM, PUBLISH, SCHEDULE, STEP_IN_PLACE, Lane, Row, Which
from longshore.optim import Offload
from longshore.optim.offload import Placement
from longshore.sharding.collective_thread import CollectiveThread, twin_of
from longshore.sharding.ownership import Ownership, Replicated
from longshore.sharding.rounds import ReductionSettings
from longshore.sharding.store import ShardedStore

if TYPE_CHECKING:
    from longshore.sharding.fsdp import FullyShardedModel

_LARGEST_ITEM_BYTES = 4
"""The size of a gradient's element: a float32 bucket, or two in 16 bits, may wait to be sent."""


@dataclass(frozen=True)
class ShardedOffload(Placement):
    """State spread over the ranks of a process group.

    Attributes:
        offload: how each rank keeps its share.
        group: of ranks; None: all of them.
        stage: 0, 1, 2 or 3.
        settings: how gradients are reduced; ``each_backward`` is the stage's.
        gather_numel: elements of parameters that are gathered together (stages 1 and 2).
        sharded: the model, at stage 3.
    """

    offload: Offload
    group: Any
    stage: int
    settings: ReductionSettings
    gather_numel: int
    sharded: FullyShardedModel | None = None

    @property
    def takes_shards(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.sharded is not None

    @property
    def leaf_of(self) -> Callable[[Tensor], Tensor | None] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return None if self.sharded is None else self.sharded.leaf_of

    @property
    def leaves_on_device(self) -> bool:
        return self.offload.leaves_on_device

    def make_store(self, device: torch.device, hold_gradients: bool, parameters: Mapping[int, Tensor]) -> ShardedStore:
        settings = replace(self.settings, each_backward=reduces_each_backward(self.stage))
        settings = replace(settings, bucket_numel=bucket_numel_of(settings))
        waiting_numel = settings.bucket_numel
        if self.sharded is not None:
            # No more than what is gathered together: the device has no room for gradients of all modules either.
            waiting_numel = min(waiting_numel, self.sharded.largest_numel)
        limit_bytes = waiting_numel * _LARGEST_ITEM_BYTES
        collectives = CollectiveThread(twin_of(self.group, device), device, limit_bytes, owns_group=True)
        # Where gradients are reduced in step() there is no backward to step ahead in.
        in_backward = settings.each_backward or settings.early
        offload = self.offload if in_backward else replace(self.offload, speculation_memory=0)
        # What comes out of a reduction is float32, whatever went in.
        local = offload.make_store(device, True, parameters, gradient_dtype=torch.float32)
        if self.sharded is not None:
            # Imported here: it imports torch's FSDP2, which takes a while.
            from longshore.sharding.fully_sharded import FullySharded

            ownership = FullySharded(collectives, self.sharded, parameters)
        else:
            ownership = Ownership(collectives, self.gather_numel) if self.stage > 0 else Replicated(collectives)
        return ShardedStore(local, ownership, settings)


def reduces_each_backward(stage: int) -> bool:
    """Whether gradients of a ZeRO stage are reduced after every backward, or once for each window."""
    return stage >= 2


def bucket_numel_of(settings: ReductionSettings) -> int:
    """Elements of one bucket."""
    if settings.early and settings.each_backward:
        # One bucket fills while another is on its way: together they are what was asked for.
        return max(1, settings.bucket_numel // 2)
    return settings.bucket_numel


REDUCE = "reduce"
"""The reduction of one bucket; every tile with a part of that bucket waits for it."""
GATHER = "gather"
"""The gathering of one bucket's parameters (stages 1 and 2), or of one unit's, before it is used (stage 3)."""

SHARDED_SCHEDULE: Mapping[str, Row] = {
    **SCHEDULE,
    REDUCE: Row(Lane.COLLECTIVES, ((ARRIVE, Which.SAME),)),
    COPY_TO_HOST: Row(Lane.TO_HOST, ((REDUCE, Which.SAME),)),
    NORM: Row(Lane.HOST, ((ARRIVE, Which.ALL), (REDUCE, Which.ALL), (COPY_TO_HOST, Which.ALL))),
    GATHER: Row(Lane.COLLECTIVES, ((STEP_IN_PLACE, Which.ALL), (PUBLISH, Which.ALL))),
}
"""The schedule of a tile (:mod:`longshore.host.events`) with what several ranks add to it."""

"""Strategies by stage: made once, asked never again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from longshore.optim import Offload
from longshore.optim.offload import Placement
from longshore.sharding.groups import twin_of
from longshore.sharding.lane import CollectiveLane
from longshore.sharding.ownership import Ownership, Replicated, Sharded
from longshore.sharding.store import ShardedStore
from longshore.sharding.window import ReductionSettings

if TYPE_CHECKING:
    from longshore.sharding.fully_sharded import FullyShardedModel

_LARGEST_ITEM_BYTES = 4
"""Of a gradient's element: a float32 bucket, or two in 16 bits, may wait to be sent."""


class Strategy(NamedTuple):
    """What a ZeRO stage means here."""

    ownership: Callable[[ShardedPlacement, CollectiveLane, Mapping[int, Tensor]], Ownership]
    each_backward: bool


@dataclass(frozen=True)
class ShardedPlacement(Placement):
    """State spread over the ranks of a process group.

    Attributes:
        offload: how each rank keeps its part.
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

    def leaf_of(self, parameter: Tensor) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return parameter if self.sharded is None else self.sharded.leaf_of(parameter)

    @property
    def leaves_on_device(self) -> bool:
        return self.offload.leaves_on_device

    def make_store(self, device: torch.device, hold_gradients: bool, parameters: Mapping[int, Tensor]) -> ShardedStore:
        strategy = STRATEGIES[self.stage]
        settings = replace(self.settings, each_backward=strategy.each_backward)
        settings = replace(settings, bucket_numel=bucket_numel_of(settings))
        waiting_numel = settings.bucket_numel
        if self.sharded is not None:
            # No more than what is gathered together: the device has no room for gradients of all modules either.
            waiting_numel = min(waiting_numel, self.sharded.largest_numel)
        lane = CollectiveLane(twin_of(self.group, device), device, waiting_numel * _LARGEST_ITEM_BYTES, owns_group=True)
        # Where gradients are reduced in step() there is no backward to step ahead in.
        in_backward = settings.each_backward or settings.early
        offload = self.offload if in_backward else replace(self.offload, speculation_memory=0)
        # What comes out of a reduction is float32, whatever went in.
        inner = offload.make_store(device, True, parameters, gradient_dtype=torch.float32)
        return ShardedStore(inner, strategy.ownership(self, lane, parameters), settings)


def bucket_numel_of(settings: ReductionSettings) -> int:
    """Elements of one bucket."""
    if settings.early and settings.each_backward:
        # One bucket fills while another is on its way: together they are what was asked for.
        return max(1, settings.bucket_numel // 2)
    return settings.bucket_numel


def _fully_sharded(placement: ShardedPlacement, lane: CollectiveLane, parameters: Mapping[int, Tensor]) -> Ownership:
    # Imported here: it imports torch's FSDP2, which takes a while.
    from longshore.sharding.fully_sharded import FullySharded

    assert placement.sharded is not None
    return FullySharded(lane, placement.sharded, parameters)


STRATEGIES: Mapping[int, Strategy] = {
    0: Strategy(lambda _, lane, __: Replicated(lane), each_backward=False),
    1: Strategy(lambda placement, lane, _: Sharded(lane, placement.gather_numel), each_backward=False),
    2: Strategy(lambda placement, lane, _: Sharded(lane, placement.gather_numel), each_backward=True),
    3: Strategy(_fully_sharded, each_backward=True),
}

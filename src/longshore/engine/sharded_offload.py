"""Settings of a store whose state is spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from longshore.layout.formats import Coding
from longshore.layout.layout import Layout, division_of
from longshore.optim.dtensor import flat, held_part
from longshore.optim.offload import Offload
from longshore.ranks.collective_thread import CollectiveThread
from longshore.ranks.twin_groups import twins_of
from longshore.store.ownership import ReplicatedOwnership, SharedOwnership, SharedResidence
from longshore.store.rounds import ReductionSettings
from longshore.store.sharded import ShardedStore
from longshore.tiles import Window

if TYPE_CHECKING:
    from longshore.stage3.fsdp import FullyShardedModel


@dataclass(frozen=True, kw_only=True)
class ShardedOffload(Offload):
    """Settings of a store whose state is spread over the ranks of a process group.

    Attributes:
        share: how each rank keeps its share; the other settings that it has are repeated here.
        group: process group of the ranks; None: all ranks.
        reduction: how gradients are reduced.
        gather_numel: number of elements that are gathered together after a step (stages 1 and 2).
        sharded: the model, at stage 3; otherwise None.
        reduce_device: where gradients come and are reduced; None: where the parameters are.
    """

    share: Offload
    group: Any
    reduction: ReductionSettings
    gather_numel: int
    sharded: FullyShardedModel | None = None
    reduce_device: torch.device | None = None
    alone: ClassVar[bool] = False

    @classmethod
    def over(cls, offload: Offload, **settings: Any) -> ShardedOffload:
        """Return ``offload``, which may be of a class of the user's, with the ``settings`` of ranks."""
        return cls(**{each.name: getattr(offload, each.name) for each in fields(Offload)}, share=offload, **settings)

    @property
    def takes_shards(self) -> bool:
        return self.sharded is not None

    @property
    def leaf_of(self) -> Callable[[Tensor], Tensor | None] | None:
        return None if self.sharded is None else self.sharded.leaf_of

    def coding_of(self, name: str, parameter: Tensor) -> Coding:
        # The store knows which of a parameter's elements this rank has.
        return self.share.coding_in_whole(name, parameter.shape)

    def check_member(self, parameter: Tensor, name: str) -> None:
        if self.sharded is not None and id(parameter) not in self.sharded.members:
            raise ValueError(
                f"parameter {name}, of shape {list(parameter.shape)}, is not one of the model that initialize() was "
                "given, and at stage 3 the model's are sharded when it is made: put it into the model before, or use "
                "stage 2, or an optimizer of its own"
            )

    def make_store(
        self, device: torch.device, hold_gradients: bool, parameters: Mapping[int, Tensor], window: Window
    ) -> ShardedStore:
        reduction = self.reduction
        waiting_numel = reduction.bucket_numel
        if self.sharded is not None:
            # At most as many as are gathered together may wait: the device has no room for gradients of all modules.
            waiting_numel = min(waiting_numel, self.sharded.largest_numel)
        limit_bytes = waiting_numel * torch.float32.itemsize  # this is also the size of two buckets in 16 bits
        reducing = device if self.reduce_device is None else self.reduce_device
        collectives = CollectiveThread(twins_of(self.group, reducing), reducing, limit_bytes)
        # If gradients are reduced in step(), there is no backward during which to step ahead.
        in_backward = reduction.each_backward or reduction.early
        share = self.share if in_backward else replace(self.share, speculation_memory=0)

        def values_of(key: int) -> Tensor:
            owned = ownership.layout.ranges[key]
            return flat(held_part(parameters[owned.parameter]))[owned.held]

        # Reduced gradients are float32, whatever their dtype was.
        tiles = share.make_tiles(device, True, values_of, window, torch.float32)
        if self.sharded is not None:
            # Imported here: it imports torch's FSDP2, which takes a while.
            from longshore.stage3.fully_sharded import FullySharded, GridOwnership

            ownership = GridOwnership(collectives, self.sharded, parameters, reduction.bucket_numel)
            residence = FullySharded(collectives, self.sharded, parameters)
        else:
            division = division_of(reduction.stage, collectives.world_size, collectives.rank)
            residence = SharedResidence()
            owning = SharedOwnership if reduction.stage > 0 else ReplicatedOwnership
            ownership = owning(collectives, Layout(division, reduction.bucket_numel), self.gather_numel)
        return ShardedStore(tiles, ownership, residence, reduction)

"""ZeRO-3: parameters on torch's FSDP2, which gathers them for each forward and backward.

The place that, with placing.py, knows FSDP2 from within (torch 2.13). It owns gathering and
prefetch. What longshore takes is the gradient of the gathered parameter, where
autograd accumulates it, before FSDP2 would reduce it. So gradients of stage 3
go the way of stage 2's: in rounds, counted, added up in float32 in the order of
the ranks, with what was not used known as such. FSDP2 finds none left to
reduce, and its own reduction (which needs every parameter used on every rank,
and rounds to the parameters' dtype) never runs.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from longshore.errors import GradientError
from longshore.layout import Slab
from longshore.optim.parameters import flat
from longshore.optim.shards import held_part
from longshore.sharding.action import Action
from longshore.sharding.bucket import Bucket, Piece, plan_shards
from longshore.sharding.gathering import GatheringLane
from longshore.sharding.groups import group_of
from longshore.sharding.lane import CollectiveLane
from longshore.sharding.ownership import Sharded
from longshore.sharding.placing import Placing
from longshore.sharding.rank_grid import Cut

_MODELS: weakref.WeakSet[FullyShardedModel] = weakref.WeakSet()


class FullyShardedModel:
    """A model to which ``fully_shard`` was applied.

    Args:
        model: its root, to which it was applied too.

    Raises:
        ValueError: a way of sharding that cannot be honoured, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        # Fixed.
        self.model = model
        named = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
        self.modules: list[FSDPModule] = [module for _, module in named]
        self.names = [name or "the model" for name, _ in named]
        self._by_id: dict[int, Any] = {}
        self.group_of: dict[int, int] = {}
        """By ``id(parameter)``: which parameters are gathered together."""
        for number, group in enumerate(self._groups()):
            for member in group.fsdp_params:
                self._by_id[id(member.sharded_param)] = member
                self.group_of[id(member.sharded_param)] = number
        self.largest_numel = max(
            sum(member.sharded_param.numel() for member in group.fsdp_params) for group in self._groups()
        )
        """Elements of the parameters that are gathered together."""
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            if id(parameter) not in self._by_id:
                raise ValueError(
                    f"parameter {name} is in no module that fully_shard was applied to; apply it to the whole model "
                    "last"
                )
        self.placing = Placing({name: self._by_id[key] for key, name in self._names.items()})
        self._check_dtypes()
        self._hook = model.register_forward_hook(self._after_forward)
        # Until each module's first forward.
        self._hooks: dict[nn.Module, RemovableHandle] = {}
        _MODELS.add(self)

    def _check_dtypes(self) -> None:
        names = self._names
        for group in self._groups():
            trainable = [each.sharded_param for each in group.fsdp_params if each.sharded_param.requires_grad]
            for parameter in trainable:
                if parameter.dtype != trainable[0].dtype:
                    raise ValueError(
                        f"parameters {names[id(trainable[0])]} ({trainable[0].dtype}) and {names[id(parameter)]} "
                        f"({parameter.dtype}) are gathered together, for which FSDP2 wants one dtype; set bf16 or "
                        "fp16, or a wrap_policy that keeps them apart"
                    )

    def close(self) -> None:
        """Leave the model as ``fully_shard`` made it."""
        for hook in (self._hook, *self._hooks.values()):
            hook.remove()
        _MODELS.discard(self)
        self.gather_by(lambda _: DefaultAllGather())

    def _after_forward(self, *_: object) -> None:
        # FSDP2 keeps the root's parameters for a backward. After an evaluation there is none: they would take memory,
        # and stand in the model in place of those that are stepped.
        if not torch.is_grad_enabled():
            self.reshard()

    def _groups(self) -> Iterator[Any]:
        for module in self.modules:
            yield from module._get_fsdp_state()._fsdp_param_groups

    def leaf_of(self, parameter: Tensor) -> Tensor | None:
        """What the parameter is gathered into, always the same tensor; None before the first time."""
        return getattr(self._by_id[id(parameter)], "_unsharded_param", None)

    def leaf_of_id(self, key: int) -> Tensor:
        """The same by ``id``, of one that is gathered."""
        return self._by_id[key]._unsharded_param

    def parameter_of_id(self, key: int) -> Tensor:
        return self._by_id[key].sharded_param

    def key_of(self, tensor: Tensor) -> int | None:
        """The ``id`` of the parameter of this model that the tensor is, or that was gathered into it."""
        for key, member in self._by_id.items():
            if tensor is member.sharded_param or tensor is getattr(member, "_unsharded_param", None):
                return key
        return None

    def ids_of_modules(self) -> list[set[int]]:
        """Of the parameters that each of the modules gathers, by their number."""
        return [
            {
                id(member.sharded_param)
                for group in module._get_fsdp_state()._fsdp_param_groups
                for member in group.fsdp_params
            }
            for module in self.modules
        ]

    def take_shard(self, parameter: Tensor, whole: Tensor) -> None:
        """Write this rank's part of ``whole`` into its shard."""
        offset, numel = self.placing.shard_of(parameter, dist.get_rank())
        held = held_part(parameter)
        held.copy_(flat(whole)[offset : offset + numel].view(held.shape))
        torch.autograd.graph.increment_version(parameter)

    def when_gathered(self, call: Callable[[], None]) -> None:
        """``call`` after each module's first forward, when its parameters have been gathered and no backward has
        reached them."""

        def once(module: nn.Module, *_: object) -> None:
            self._hooks.pop(module).remove()
            call()

        for module in self.modules:
            assert isinstance(module, nn.Module)
            self._hooks[module] = module.register_forward_hook(once)

    def gather_by(self, how: Callable[[int], AllGather]) -> None:
        """Gather the parameters of module number ``n`` by ``how(n)``, but where the user chose a way."""
        for number, module in enumerate(self.modules):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                if isinstance(group._all_gather_comm, DefaultAllGather):
                    group._all_gather_comm = how(number)

    def reshard(self) -> None:
        """Let go of what is gathered: the root's parameters stay after a forward without a backward, and would be
        stale."""
        for module in self.modules:
            module.reshard()

    def reset(self) -> None:
        """After a forward or backward that raised: otherwise later ones would run no hooks."""
        root = self.model
        assert isinstance(root, FSDPModule)
        if root._get_fsdp_state()._is_root is not None:  # None: there was no forward yet
            root.reset_iter_state()

    def name_of_id(self, key: int) -> str:
        return self._names[key]


@contextlib.contextmanager
def unsharded(parameters: Sequence[Tensor], write_back: bool) -> Iterator[dict[int, Tensor]]:
    """Gather these parameters: whole ones by ``id`` of the sharded ones; all ranks have to call.

    ``write_back``: at the end each rank takes its shards from what it has then.

    Raises:
        ValueError: a parameter of no model that is known here, or one that cannot be written so.
    """
    found: dict[int, tuple[FullyShardedModel, int]] = {}
    for parameter in parameters:
        owners = ((model, key) for model in _MODELS if (key := model.key_of(parameter)) is not None)
        if (owner := next(owners, None)) is None:
            raise ValueError(
                f"a sharded parameter of shape {list(parameter.shape)} belongs to no model that longshore.initialize() "
                "was given, or its engine is gone"
            )
        model, key = found[id(parameter)] = owner
        if write_back and model.placing.is_parallel(model.parameter_of_id(key)):
            # The module keeps its part, and a write there, on one rank, would be lost without a word.
            raise ValueError(
                f"parameter {model.name_of_id(key)} is one of tensor parallelism, of which gather() gives a copy to "
                "read; to write it use longshore.utils.safe_set_full_fp32_param()"
            )
    modules = [
        module
        for model in dict.fromkeys(model for model, _ in found.values())
        for module, ids in zip(model.modules, model.ids_of_modules(), strict=True)
        if not ids.isdisjoint(key for _, key in found.values())
    ]
    try:
        for module in modules:
            module.unshard()
        whole = {given: _whole(model.leaf_of_id(key)) for given, (model, key) in found.items()}
        yield whole
        if write_back:
            with torch.no_grad():
                for given, (model, key) in found.items():
                    model.take_shard(model.parameter_of_id(key), whole[given])
    finally:
        for module in modules:
            module.reshard()


def _whole(leaf: Tensor) -> Tensor:
    return leaf.full_tensor().detach() if isinstance(leaf, DTensor) else leaf


class FullySharded(Sharded):
    """Each rank steps the shards of the parameters that it has.

    Args:
        lane: the ranks.
        sharded: the model.
        parameters: by index, also those that come later.
    """

    replicates = False

    def __init__(self, lane: CollectiveLane, sharded: FullyShardedModel, parameters: Mapping[int, Tensor]) -> None:
        super().__init__(lane, gather_numel=1)
        self._sharded = sharded
        self._parameters = parameters
        self._placing = sharded.placing
        self._data_ranks = self._placing.grid.alike(self._placing.part)
        if self._placing.grid.parts > 1:
            # All ranks meet in the lane, and take the same verdict there. Gradients go in its jobs, by this one.
            group = group_of(self._data_ranks, lane.group, lane.device)
            self.averaging_lane = CollectiveLane(group, lane.device, limit_bytes=1, owns_group=True)
        self._gathering = GatheringLane(self._placing.shard_group, lane.device, sharded.names, self.windows)
        sharded.gather_by(self._gathering.of)

    def plan(
        self,
        parameters: Sequence[tuple[int, int, torch.dtype]],
        bucket_numel: int,
        first_bucket: int,
        first_piece: int,
    ) -> tuple[Bucket, ...]:
        shards = {index: [self._shard(index, rank) for rank in self._data_ranks] for index, _, _ in parameters}
        # What is gathered together gets its gradients together. Buckets are filled by the size of whole parameters, so
        # that they are the same for all parts of tensor parallelism.
        kinds = [
            (index, numel, (dtype, self._sharded.group_of[id(self._parameters[index])]))
            for index, numel, dtype in parameters
        ]
        return plan_shards(kinds, bucket_numel, shards, first_bucket, first_piece)

    def _shard(self, parameter: int, rank: int) -> tuple[int, int]:
        return self._placing.shard_of(self._parameters[parameter], rank)

    def counts(self, bucket: Bucket, parameter: int) -> list[int]:
        return [self._shard(parameter, rank)[1] for rank in range(self.lane.world_size)]

    def place(self, piece: Piece) -> slice:
        return slice(0, piece.numel)

    def part(self, parameter: int, values: Tensor) -> Tensor:
        return self._cut(parameter).part_of(values, self._placing.part)

    def held(self, parameter: int, values: Tensor) -> Tensor:
        offset, numel = self._shard(parameter, self.lane.rank)
        return self.part(parameter, values)[offset : offset + numel]

    def _cut(self, parameter: int) -> Cut:
        return self._placing.cut_of(self._parameters[parameter])

    def check_used(self, parameters: Sequence[int], by_rank: Sequence[Sequence[bool]]) -> None:
        grid = self._placing.grid
        for place, parameter in enumerate(parameters):
            parts = [part for part in range(grid.parts) if any(by_rank[rank][place] for rank in grid.alike(part))]
            if 0 < len(parts) < grid.parts:
                raise GradientError(
                    f"parameter {self._sharded.name_of_id(id(self._parameters[parameter]))} has a gradient on rank "
                    f"{', '.join(map(str, grid.alike(parts[0])))}, and none on the other ranks of tensor parallelism; "
                    "these have to run the same backwards on the same data"
                )

    def outside_of_the_model(self, action: Action, failed: bool = False) -> None:
        if failed:
            self._gathering.give_up()  # others may still be in the model, and would wait there for this rank
        self._gathering.meet(action)

    def close(self) -> None:
        self._sharded.close()
        self._gathering.close()
        if self.averaging_lane is not self.lane:
            with contextlib.suppress(Exception):  # whoever waited for them heard of it
                self.lane.drain()  # its jobs use the other one
            self.averaging_lane.close()

    def before_publishing(self) -> None:
        self._sharded.reshard()

    def into_backward(self) -> None:
        # One whose forward raised behind all that is gathered is told of nothing in it, and is not in this backward:
        # a round without it would be waited for, by the rank that it waits for in its next forward.
        try:
            self._gathering.meet(Action.BACKWARD)
        except BaseException:
            self.give_up()
            raise

    def interrupted(self) -> bool:
        self.give_up()
        return True

    def give_up(self) -> None:
        self._gathering.interrupted()
        self.lane.give_up_window()  # other replicas gather by themselves
        self._sharded.reset()

    def tells(self, parameter: int, rank: int) -> bool:
        place = self._placing.grid.places[rank]
        return place.replica == 0 and (place.part == 0 or self._cut(parameter).dim is not None)

    def tells_of(self, bucket: Bucket, piece: Piece) -> bool:
        return self.tells(piece.parameter, self.lane.rank)

    def slab_of(self, parameter: int) -> Slab | None:
        return self._cut(parameter).slab(self._placing.part)

    def assemble(self, parameter: int, pieces: Sequence[Sequence[Piece]], read: Callable[[int], Tensor]) -> Tensor:
        mine = [read(piece.index) for piece in pieces[self.averaging_lane.rank]]
        numels = [self._shard(parameter, rank)[1] for rank in range(self.lane.world_size)]
        received = self.from_all(parameter, mine, max(numels))
        held = [values[:numel] for values, numel in zip(received, numels, strict=True)]
        return self._placing.joined(self._parameters[parameter], held)

    def publish(self, bucket: Bucket, targets: Mapping[int, Tensor]) -> None:
        return

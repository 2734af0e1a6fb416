"""ZeRO-3: parameters on torch's FSDP2, which gathers them for each forward and backward.

The one place that knows FSDP2 from within (torch 2.13). It owns gathering and
prefetch. What longshore takes is the gradient of the gathered parameter, where
autograd accumulates it, before FSDP2 would reduce it. So gradients of stage 3
go the way of stage 2's: in rounds, counted, added up in float32 in the order of
the ranks, with what was not used known as such. FSDP2 finds none left to
reduce, and its own reduction (which needs every parameter used on every rank,
and rounds to the parameters' dtype) never runs.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor, Shard
from torch.utils.hooks import RemovableHandle

from longshore.optim.parameters import flat
from longshore.optim.shards import held_part
from longshore.sharding.bucket import Bucket, Piece, plan_shards
from longshore.sharding.gathering import GatheringLane
from longshore.sharding.lane import Action, CollectiveLane
from longshore.sharding.ownership import Sharded

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
        first = next(model.parameters())
        assert isinstance(first, DTensor)
        self.mesh = first.device_mesh
        """All ranks; the last dimension shards, the others replicate."""
        for name, parameter in model.named_parameters():
            self._check(name, parameter)
        self._check_dtypes()
        self._hook = model.register_forward_hook(self._after_forward)
        # Until each module's first forward.
        self._hooks: dict[nn.Module, RemovableHandle] = {}
        _MODELS.add(self)

    def _check_dtypes(self) -> None:
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
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

    def _check(self, name: str, parameter: Tensor) -> None:
        if id(parameter) not in self._by_id:
            raise ValueError(
                f"parameter {name} is in no module that fully_shard was applied to; apply it to the whole model last"
            )
        assert isinstance(parameter, DTensor)
        mesh, placements = parameter.device_mesh, parameter.placements
        if placements[-1] != Shard(0) or any(not placement.is_replicate() for placement in placements[:-1]):
            raise ValueError(
                f"parameter {name} is placed as {placements} on {mesh}; longshore steps parameters that are sharded "
                "along their first dimension over the last dimension of a mesh, and replicated over the others"
            )
        if mesh != self.mesh or mesh.size() != dist.get_world_size():
            raise ValueError(f"parameter {name} is on {mesh}; all parameters have to be on one mesh of all ranks")

    def leaf_of(self, parameter: Tensor) -> Tensor | None:
        """What the parameter is gathered into, always the same tensor; None before the first time."""
        return getattr(self._by_id[id(parameter)], "_unsharded_param", None)

    def leaf_of_id(self, key: int) -> Tensor:
        """The same by ``id``, of one that is gathered."""
        return self._by_id[key]._unsharded_param

    def has(self, parameter: Tensor) -> bool:
        """Whether it is one of this model's."""
        member = self._by_id.get(id(parameter))
        return member is not None and member.sharded_param is parameter

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
        offset, numel = self.shards_of(parameter)[dist.get_rank()]
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

    def shards_of(self, parameter: Tensor) -> list[tuple[int, int]]:
        """``(offset, numel)`` of each rank's part in the flat parameter: FSDP2 cuts as ``torch.chunk`` does."""
        rows, shards = parameter.shape[0], self.mesh.size(-1)
        row_numel = parameter.numel() // rows if rows else 0
        step = -(-rows // shards)
        starts = [min(shard * step, rows) for shard in range(shards + 1)]
        parts = [(start * row_numel, (stop - start) * row_numel) for start, stop in itertools.pairwise(starts)]
        return [parts[shard] for _, shard in self.places]

    @property
    def places(self) -> list[tuple[int, int]]:
        """Of each rank: which of the replicas it belongs to, and which shard it has."""
        ranks = self.mesh.mesh.reshape(-1, self.mesh.size(-1)).tolist()
        found = {rank: (replica, shard) for replica, row in enumerate(ranks) for shard, rank in enumerate(row)}
        return [found[rank] for rank in range(len(found))]

    @property
    def shard_group(self) -> Any:
        """The ranks that have the shards of one replica, this one among them."""
        return self.mesh.get_group(self.mesh.ndim - 1)


@contextlib.contextmanager
def unsharded(parameters: Sequence[Tensor], write_back: bool) -> Iterator[dict[int, Tensor]]:
    """Gather these parameters: whole ones by ``id`` of the sharded ones; all ranks have to call.

    ``write_back``: at the end each rank takes its shards from what it has then.

    Raises:
        ValueError: a parameter of no model that is known here.
    """
    models = {id(parameter): model for model in _MODELS for parameter in parameters if model.has(parameter)}
    for parameter in parameters:
        if id(parameter) not in models:
            raise ValueError(
                f"a sharded parameter of shape {list(parameter.shape)} belongs to no model that longshore.initialize() "
                "was given, or its engine is gone"
            )
    modules = [
        module
        for model in dict.fromkeys(models.values())
        for module, ids in zip(model.modules, model.ids_of_modules(), strict=True)
        if not ids.isdisjoint(models)
    ]
    try:
        for module in modules:
            module.unshard()
        whole = {key: model.leaf_of_id(key) for key, model in models.items()}
        yield whole
        if write_back:
            with torch.no_grad():
                for parameter in parameters:
                    models[id(parameter)].take_shard(parameter, whole[id(parameter)])
    finally:
        for module in modules:
            module.reshard()


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
        self._replica_of = [replica for replica, _ in sharded.places]
        self._gathering = GatheringLane(sharded.shard_group, lane.device, sharded.names, self.windows)
        sharded.gather_by(self._gathering.of)

    def plan(
        self,
        parameters: Sequence[tuple[int, int, torch.dtype]],
        bucket_numel: int,
        first_bucket: int,
        first_piece: int,
    ) -> tuple[Bucket, ...]:
        shards = {index: self._sharded.shards_of(self._parameters[index]) for index, _, _ in parameters}
        # What is gathered together gets its gradients together.
        kinds = [
            (index, numel, (dtype, self._sharded.group_of[id(self._parameters[index])]))
            for index, numel, dtype in parameters
        ]
        return plan_shards(kinds, bucket_numel, shards, first_bucket, first_piece)

    def place(self, piece: Piece) -> slice:
        return slice(0, piece.numel)

    def held(self, parameter: int, values: Tensor) -> Tensor:
        offset, numel = self._sharded.shards_of(self._parameters[parameter])[self.lane.rank]
        return values[offset : offset + numel]

    def outside_of_the_model(self, failed: bool) -> None:
        if failed:
            self._gathering.give_up()  # others may still be in the model, and would wait there for this rank
        self._gathering.meet(Action.STEP)

    def close(self) -> None:
        self._sharded.close()
        self._gathering.close()

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

    def tells(self, rank: int) -> bool:
        return self._replica_of[rank] == 0

    def publish(self, bucket: Bucket, targets: Mapping[int, Tensor]) -> None:
        return

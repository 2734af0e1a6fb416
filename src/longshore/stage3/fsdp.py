"""A model on torch's FSDP2, which gathers its parameters for each forward and backward; and ``gather()``, inside of
which they are whole.

Only this file, gathered.py, and ``ModuleGather`` in fully_sharded.py, use FSDP2's private interfaces (torch 2.13).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from longshore.accelerator import Mark, mark_on, wait_for
from longshore.errors import LongshoreError, ParameterError
from longshore.layout.layout import ParameterLayout, RankGrid
from longshore.optim.dtensor import flat, former_of, held_part, is_former, is_sharded, like, present
from longshore.stage3.gathered import GatheredWrites, Handles, Whole

_TRAINABLE: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
"""Which parameters were trainable when :func:`align_trainable` saw them last, by FSDP2's record. It outlives engines,
since scripts freeze and thaw between two of them, too."""

_MODELS: weakref.WeakSet[FullyShardedModel] = weakref.WeakSet()
"""The models of all engines."""


@dataclass(frozen=True)
class _Same:
    """Stands for an input that is the one at ``place`` among all inputs, flat, while FSDP2 sees them."""

    place: int


def keep_same_inputs(module: nn.Module) -> list[RemovableHandle]:
    """Have FSDP2 see each input of a unit once; the hooks that are returned do so."""
    return [
        module.register_forward_pre_hook(_leave_out, prepend=True, with_kwargs=True),  # before FSDP2's own
        module.register_forward_pre_hook(_put_back, with_kwargs=True),
    ]


@_disable_dynamo
def _leave_out(_: nn.Module, args: Any, kwargs: Any) -> Any:
    inputs, form = tree_flatten((args, kwargs))
    tensors = [id(each) for each in inputs if isinstance(each, Tensor)]
    if len(set(tensors)) == len(tensors):
        return None
    first: dict[int, int] = {}
    for place, each in enumerate(inputs):
        if isinstance(each, Tensor) and first.setdefault(id(each), place) != place:
            inputs[place] = _Same(first[id(each)])
    return tree_unflatten(inputs, form)


@_disable_dynamo
def _put_back(_: nn.Module, args: Any, kwargs: Any) -> Any:
    inputs, form = tree_flatten((args, kwargs))
    if not any(isinstance(each, _Same) for each in inputs):
        return None
    return tree_unflatten([inputs[each.place] if isinstance(each, _Same) else each for each in inputs], form)


def tensor_parallel_size(model: nn.Module) -> int:
    """Return the number of ranks of tensor parallelism in a model that ``fully_shard`` was applied to."""
    specs = [member._unsharded_dtensor_spec for member in members_of(model)]
    return max((spec.mesh.size() for spec in specs if spec is not None), default=1)


def groups_of(module: FSDPModule) -> Sequence[Any]:
    """Return FSDP2's records of the groups of parameters that it gathers together for a module."""
    return module._get_fsdp_state()._fsdp_param_groups


def members_of(model: nn.Module) -> list[Any]:
    """Return FSDP2's records of all parameters of a model."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return [member for module in modules for group in groups_of(module) for member in group.fsdp_params]


def check_not_gathered(model: nn.Module) -> None:
    """Raise ValueError if parameters of a model are gathered now: the trained parameters, and the weights, would be
    theirs."""
    gathered = {id(getattr(member, "_unsharded_param", None)) for member in members_of(model)}
    for name, parameter in model.named_parameters():
        if id(parameter) in gathered:
            raise ValueError(
                f"parameter {name} is gathered, as a forward without a backward leaves it, and not a shard: call "
                "reshard() of the model (and of each module that stays gathered) before initialize()"
            )


def align_trainable(members: Iterable[Any]) -> None:
    """Freeze or thaw a shard, the tensor into which it is gathered, and the parameter that it replaced as the user did
    one of them.

    FSDP2 only ever carries this from shards to gathered tensors, when it gathers them. Users may hold any of them.
    """
    for member in members:
        shard = member.sharded_param
        leaf = getattr(member, "_unsharded_param", shard)
        former = former_of(shard)
        handles = (shard, leaf) if former is None else (shard, leaf, former)
        # Before any engine, the gathered tensor is as the shard was when FSDP2 gathered it last.
        before = _TRAINABLE.setdefault(member, leaf.requires_grad)
        if all(each.requires_grad == before for each in handles):
            continue
        _TRAINABLE[member] = not before
        for each in handles:
            each.requires_grad_(not before)


def modules_with(member: Any) -> list[nn.Module]:
    """Return the modules that have a parameter: several if it is tied."""
    return [member._module_info.module, *member._module_info.shared_modules]


def parallel_placements(member: Any) -> Sequence[Any]:
    """Return the placements on the dimensions of tensor parallelism; empty for a parameter outside of it."""
    spec = member._unsharded_dtensor_spec
    return () if spec is None else spec.placements


def check_supported(name: str, member: Any) -> None:
    """Raise ValueError if longshore does not step a parameter that is placed like this one."""
    placements, parallel = member.sharded_param.placements, parallel_placements(member)
    found = f"parameter {name} is placed as {placements} on {member._spmd_mesh}"
    # Other placements, such as strided shards, are of neither type.
    taken = all(type(each) in (Shard, Replicate) for each in parallel)
    if len(parallel) > 1 or not taken or member.mesh_info.is_spmd_mesh:
        raise ValueError(
            f"{found}; beside fully_shard longshore takes tensor parallelism over one dimension of a mesh, applied "
            "before it, that shards or replicates each parameter (parallelize_module, and then fully_shard with the "
            "mesh of the other dimensions)"
        )
    *replicated, sharded = placements[: len(placements) - len(parallel)]
    # The placement is strided if tensor parallelism divides the first dimension too: FSDP2 then divides each part.
    by_rows = getattr(sharded, "dim", None) == 0
    if not by_rows or not all(placement.is_replicate() for placement in replicated):
        raise ValueError(
            f"{found}; longshore steps parameters that are sharded along their first dimension over the last dimension "
            "of a mesh (that of tensor parallelism left aside), and replicated over the others"
        )


class CopiesOfShards:
    """Copies to the device of shards that rest on the host, if they do. Callers of the model may write to its
    parameters as soon as a forward or backward returns, and torch has no hook for that, so that these wait for the
    copies."""

    def __init__(self, resting: bool = False) -> None:
        self.resting = resting
        self._last: Mark | None = None

    def began(self, device: torch.device) -> None:
        """Note that the current stream of the device waits for the copies so far."""
        if not self.resting:
            return
        self._last = mark_on(device)
        if torch._C._current_graph_task_id() != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self.wait)  # pyright: ignore

    @_disable_dynamo
    def wait(self, *_: object) -> None:
        last, self._last = self._last, None
        if last is not None:
            wait_for(last)


class FullyShardedModel:
    """A model to which ``fully_shard`` was applied, the root last.

    Attributes:
        module_names: names of the modules that gather parameters, by number.
        members: FSDP2's record of each parameter, by ``id(parameter)``.
        group_of: number of the group in which a parameter is gathered, by ``id(parameter)``.
        largest_numel: elements of the largest group of parameters that are gathered together.
        names: names of parameters, by ``id(parameter)``.
        tp_rank: this rank's place in tensor parallelism.
        copies: of shards that rest on the host.
        whole: parameters that are whole now, inside blocks of ``gather()``, by ``id(parameter)``.

    Raises:
        ValueError: the model is sharded in a way that longshore does not support, as the message says.
    """

    def __init__(self, model: nn.Module) -> None:
        # These are fixed.
        self.model = model
        named = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
        self.modules: list[FSDPModule] = [module for _, module in named]
        self.module_names = [name or "the model" for name, _ in named]
        self.members: dict[int, Any] = {}
        self.whole: dict[int, Whole] = {}
        self.group_of: dict[int, int] = {}
        groups = [group for module in self.modules for group in groups_of(module)]
        for number, group in enumerate(groups):
            for member in group.fsdp_params:
                self.members[id(member.sharded_param)] = member
                self.group_of[id(member.sharded_param)] = number
        self.largest_numel = max(sum(each.sharded_param.numel() for each in group.fsdp_params) for group in groups)
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        for key, name in self.names.items():
            if key not in self.members:
                raise ValueError(
                    f"parameter {name} is in no module that fully_shard was applied to; apply it to the whole model "
                    "last"
                )
        self._data_mesh, self.grid = self._check_meshes()
        self.tp_rank = self.grid.positions[dist.get_rank()].tp_rank
        self._check_dtypes(groups)
        for other in [each for each in _MODELS if not self.members.keys().isdisjoint(each.members)]:
            other.close()  # its engine was not destroyed; it gives the parameters up to this one
        align_trainable(self.members.values())
        self._writes = GatheredWrites()
        self.handles = Handles({name: key for key, name in self.names.items()}, self.members, self.whole)
        self.discarded = False
        """Whether a window was discarded since the last forward. The root's parameters may still be gathered for its
        backward, and no more where a rank failed, so that not all would gather them in the next forward."""
        self._lasting_hooks = [
            model.register_forward_pre_hook(self._before_forward, prepend=True),  # before FSDP2's own
            model.register_forward_hook(self._after_forward),
            model.register_state_dict_pre_hook(lambda *_: self.align()),
        ]
        before: Any = model._state_dict_pre_hooks
        before.move_to_end(self._lasting_hooks[-1].id, last=False)  # before FSDP2's own, which frees gathered tensors
        self._lasting_hooks += [
            module.register_load_state_dict_pre_hook(self._before_loading) for module in model.modules()
        ]
        self._lasting_hooks += [hook for module in self.modules for hook in keep_same_inputs(module)]  # pyright: ignore
        self.copies = CopiesOfShards(any(member.offload_to_cpu for member in self.members.values()))
        if self.copies.resting:
            self._lasting_hooks += [
                module.register_forward_hook(self.copies.wait, always_call=True)  # pyright: ignore
                for module in self.modules
            ]
        self._look_again: Callable[[], None] = lambda: None
        # Each of these stays until its module's first forward.
        self._hooks: dict[nn.Module, RemovableHandle] = {}
        for module in model.modules():
            module.zero_grad = functools.partial(_zero_grad, module, module.zero_grad)
        for module in self.modules:
            module.reshard = functools.partial(self._reshard, module)
        _MODELS.add(self)

    def _check_meshes(self) -> tuple[Any, RankGrid]:
        """Return FSDP2's mesh, and the grid of all ranks."""
        members = {name: self.members[key] for key, name in self.names.items()}
        # FSDP2's mesh: the last dimension shards, the others replicate. Parameters outside tensor parallelism are on
        # this mesh, whose ranks have the same part of the other parameters.
        data_mesh = next(iter(members.values())).mesh_info.mesh
        parallel = (each._spmd_mesh for each in members.values() if each._unsharded_dtensor_spec is not None)
        whole = next(parallel, data_mesh)
        for name, member in members.items():
            check_supported(name, member)
            expected = whole if parallel_placements(member) else data_mesh
            mesh = member._spmd_mesh
            if not torch.equal(mesh.mesh, expected.mesh) or whole.size() != dist.get_world_size():
                raise ValueError(f"parameter {name} is on {mesh}; all parameters have to be on one mesh of all ranks")
        tp_size = whole.size() // data_mesh.size()
        return data_mesh, RankGrid(whole.mesh.reshape(-1, data_mesh.size(-1), tp_size).tolist())

    def _check_dtypes(self, groups: Sequence[Any]) -> None:
        for group in groups:
            trainable = [each.sharded_param for each in group.fsdp_params if each.sharded_param.requires_grad]
            for parameter in trainable:
                if parameter.dtype != trainable[0].dtype:
                    raise ValueError(
                        f"parameters {self.names[id(trainable[0])]} ({trainable[0].dtype}) and "
                        f"{self.names[id(parameter)]} ({parameter.dtype}) are gathered together, for which FSDP2 wants "
                        "one dtype; set bf16 or fp16, or a wrap_policy that keeps them apart"
                    )

    def layout_of(self, parameter: Tensor) -> ParameterLayout:
        """Return which rank has which part of a parameter."""
        parallel = parallel_placements(self.members[id(parameter)])
        dim = next((placement.dim for placement in parallel if placement.is_shard()), None)
        return ParameterLayout(tuple(parameter.shape), dim, self.grid)

    @property
    def shard_group(self) -> Any:
        """Process group of this rank and those with the other shards of the same replica and tensor-parallel part."""
        return self._data_mesh.get_group(self._data_mesh.ndim - 1)

    def close(self) -> None:
        """Restore the model to how ``fully_shard`` made it; nothing if another engine has it by now."""
        if self not in _MODELS:
            return
        for hook in (*self._lasting_hooks, *self._hooks.values()):
            hook.remove()
        for module in self.model.modules():
            for name in ("zero_grad", "reshard"):
                vars(module).pop(name, None)
        _MODELS.discard(self)
        self.gather_by(lambda _: DefaultAllGather())

    def check_kept(self) -> None:
        """Raise LongshoreError if another engine has the model by now: its forwards and writes are not seen here."""
        if self not in _MODELS:
            raise LongshoreError(
                "initialize() was called again for this model, which one engine has at stage 3: go on with that one, "
                "and call destroy() of this one (before initialize() if they are to take turns)"
            )

    @_disable_dynamo
    def _before_forward(self, *_: object) -> None:
        self.align()
        self._look_again()  # at what was thawed
        if self.discarded:
            self.discarded = False
            self._free()

    def align(self) -> None:
        """Make one of shards and gathered tensors: both have scripts' changes of either. Not for inside a forward.

        Raises:
            ParameterError: as :meth:`GatheredWrites.take`, the parameters are shards then, and :meth:`Handles.check`.
        """
        self.handles.check()
        self._carry_writes()

    def _carry_writes(self) -> None:
        self.align_trainable()
        anew = True
        try:
            anew = self._writes.take()
        finally:
            if anew:
                self._free()

    def align_trainable(self) -> None:
        align_trainable(self.members.values())

    @_disable_dynamo
    def _after_forward(self, *_: object) -> None:
        # FSDP2 keeps the root's parameters for a backward. After an evaluation there is no backward: they would take
        # memory, and replace in the model the parameters that are stepped.
        if torch.is_grad_enabled():
            self._writes.watch((self.names[key], each, self.layout_of) for key, each in self.members.items())
        else:
            self._free()

    def _before_loading(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: object
    ) -> None:
        """Let a module's shards be loaded from whole tensors, which every rank has, as at other stages."""
        for name, parameter in module._parameters.items():
            given = state.get(prefix + name)
            if parameter is None or given is None or id(parameter) not in self.members or id(parameter) in self.whole:
                continue
            if metadata.get("assign_to_params_buffers"):
                raise ParameterError(
                    f"load_state_dict(assign=True) would put another tensor in the place of parameter {prefix + name}, "
                    "which would not be trained: leave assign out"
                )
            if isinstance(given, Tensor) and not is_sharded(given) and given.shape == parameter.shape:
                layout, shard = self.layout_of(parameter), held_part(parameter)
                offset, numel = layout.shard(dist.get_rank())
                mine = layout.part_of(flat(given), self.tp_rank)[offset : offset + numel]
                state[prefix + name] = like(parameter, mine.view(shard.shape).to(shard.device))

    def leaf_of(self, parameter: Tensor) -> Tensor | None:
        """Return the tensor into which the parameter is gathered, always the same one; None before the first gather."""
        return getattr(self.members[id(parameter)], "_unsharded_param", None)

    def when_gathered(self, call: Callable[[], None]) -> None:
        """Call ``call`` before each forward of the model, and after each module's first one, when its parameters have
        been gathered and no backward has reached them."""
        self._look_again = call

        @_disable_dynamo  # it looks into weak dictionaries, which other threads change meanwhile
        def once(module: nn.Module, *_: object) -> None:
            self._hooks.pop(module).remove()
            assert isinstance(module, FSDPModule)
            for member in (member for group in groups_of(module) for member in group.fsdp_params):
                if member.sharded_param.numel() == 0:
                    # Nobody takes this gradient, and FSDP2 cannot reduce a tensor without elements.
                    leaf = member._unsharded_param
                    trains = leaf.requires_grad
                    leaf.requires_grad_().register_post_accumulate_grad_hook(_drop_gradient)
                    leaf.requires_grad_(trains)  # a frozen one may thaw later
            call()

        for module in self.modules:
            assert isinstance(module, nn.Module)
            self._hooks[module] = module.register_forward_hook(once)

    def gather_by(self, how: Callable[[int], AllGather]) -> None:
        """Gather the parameters of module number ``n`` by ``how(n)``, unless the user chose an all-gather."""
        for number, module in enumerate(self.modules):
            for group in groups_of(module):
                if isinstance(group._all_gather_comm, DefaultAllGather):
                    group._all_gather_comm = how(number)

    def reshard(self) -> None:
        """Free gathered parameters, in a step: the root's parameters stay after a forward alone, and become stale."""
        self._carry_writes()
        self._free()

    def align_before_backward(self) -> None:
        """As :meth:`align`; gathered parameters stay so, unless this raises."""
        self.align_trainable()
        try:
            self._writes.take_before_backward()
        except BaseException:
            self._free()
            raise

    def _reshard(self, module: FSDPModule) -> None:
        """Answer a script's ``module.reshard()``."""
        self.align()
        FSDPModule.reshard(module)

    def _free(self) -> None:
        self.align_trainable()
        for module in self.modules:
            FSDPModule.reshard(module)

    def reset(self) -> None:
        """Reset FSDP2 after a forward or backward that raised: otherwise later ones would run no hooks."""
        root = self.model
        assert isinstance(root, FSDPModule)
        if root._get_fsdp_state()._is_root is not None:  # None: there was no forward yet
            root.reset_iter_state()


def _drop_gradient(leaf: Tensor) -> None:
    leaf.grad = None


def _zero_grad(module: nn.Module, former: Callable[[bool], None], set_to_none: bool = True) -> None:
    """Clear the gradients of a module, those of its shards too: while parameters are gathered, the module has these,
    and ``former``, its own method, would not find the shards."""
    former(set_to_none)
    within = set(module.modules())
    found = [each for model in _MODELS for each in model.members.values() if not within.isdisjoint(modules_with(each))]
    shards = [each.sharded_param for each in found]
    nn.ParameterList(shards).zero_grad(set_to_none)
    for replaced in map(former_of, shards):
        if replaced is not None:
            replaced.grad = None


def is_member(parameter: Tensor) -> bool:
    """Return whether a tensor is a parameter of a known model: a shard, the gathered tensor, or its replacement."""
    return is_former(parameter) or _find(parameter) is not None


def _find(parameter: Tensor) -> tuple[FullyShardedModel, Any] | None:
    for model in _MODELS:
        member = model.members.get(id(parameter))
        if member is not None and member.sharded_param is parameter:
            return model, member
        for member in model.members.values():
            if parameter is getattr(member, "_unsharded_param", None):
                return model, member
    return None


def sharded_of(parameter: Tensor) -> Tensor | None:
    """Return the shard of a parameter (see :func:`is_member`); None if its model's engine is gone."""
    found = _find(present(parameter))
    return None if found is None else found[1].sharded_param


def member_of(parameter: Tensor) -> tuple[FullyShardedModel, Any]:
    """Return the model of a parameter (see :func:`is_member`), and FSDP2's record of it."""
    found = _find(present(parameter))
    if found is None:
        raise ValueError(
            f"a sharded parameter of shape {list(parameter.shape)} belongs to no model that longshore.initialize() "
            "was given, or its engine is gone"
        )
    return found


class GatherBlock:
    """Parameters that are whole inside one block of ``gather()``; blocks may be inside one another.

    All ranks have to make it and to :meth:`leave` it.

    Args:
        parameters: sharded parameters, given as shards, as the tensors into which they are gathered, or as the
            parameters that the shards replaced.
        writes: whether they are to be written.

    Raises:
        ValueError: a parameter belongs to no known model, or is one of tensor parallelism and is to be written.
    """

    def __init__(self, parameters: Sequence[Tensor], writes: bool) -> None:
        found: dict[int, tuple[FullyShardedModel, Any]] = {}
        self.handles: list[Tensor] = []
        """Tensors that are whole inside, in the order of ``parameters``: the shards, and those that they replaced."""
        for given in parameters:
            model, member = member_of(given)
            found[id(member)] = model, member
            self.handles.append(given if is_former(given) else member.sharded_param)
            if writes and parallel_placements(member):
                # The module keeps its part, and a write to the copy would be lost silently.
                raise ValueError(
                    f"parameter {model.names[id(member.sharded_param)]} is one of tensor parallelism, of which "
                    "gather() gives a copy to read; to write it use longshore.utils.safe_set_full_fp32_param()"
                )
        self._writes = writes
        self._members = list(found.values())
        self._models = list(dict.fromkeys(model for model, _ in self._members))
        self._modules = [
            module
            for model in self._models
            for module in model.modules
            if any(id(member) in found for group in groups_of(module) for member in group.fsdp_params)
        ]
        for model in self._models:
            model.align()
        try:
            for module in self._modules:
                self._gather(module)
        except BaseException:
            self.leave()
            raise

    def _gather(self, module: FSDPModule) -> None:
        """Make those of the parameters whole that a module gathers, one module after the other: memory for one more is
        enough."""
        here = {id(member) for group in groups_of(module) for member in group.fsdp_params}
        wanted = [(model, member) for model, member in self._members if id(member) in here]
        if any(id(member.sharded_param) not in model.whole for model, member in wanted):
            module.unshard()
        for model, member in wanted:
            shard = member.sharded_param
            if id(shard) not in model.whole:
                former = [] if (one := former_of(shard)) is None else [one]
                model.whole[id(shard)] = Whole(model.names[id(shard)], shard, member._unsharded_param, former)
            model.whole[id(shard)].begin(self, self._writes)
        if all(model.grid.tp_size == 1 for model, _ in wanted):
            FSDPModule.reshard(module)  # the module has the shards now, which are whole

    def whole(self) -> list[Whole]:
        return [model.whole[id(member.sharded_param)] for model, member in self._members]

    def problems(self) -> list[str]:
        """Return the changes of the block that cannot stay, by parameter."""
        found = []
        for each in self.whole():
            if (problem := each.take()) is not None:
                found.append(problem)
            elif each.written_in(self):
                found.append(f"parameter {each.name} was written without modifier_rank")
        return found

    @torch.no_grad()
    def write(self) -> None:
        """Give the shards the whole values, which are those of all ranks now."""
        for model, member in self._members:
            whole, shard = model.whole[id(member.sharded_param)], held_part(member.sharded_param)
            offset, numel = model.layout_of(member.sharded_param).shard(dist.get_rank())
            shard.copy_(flat(whole.tensor)[offset : offset + numel].view(shard.shape))
            # These are the versions of the shard itself, which tells the optimizer that somebody wrote.
            torch.autograd.graph.increment_version(member.sharded_param)
            for block, digest in whole.digests.items():
                if digest is not None:
                    whole.digests[block] = whole.digest()  # another block around this one

    def leave(self) -> None:
        for model, member in self._members:
            key = id(member.sharded_param)
            if (whole := model.whole.get(key)) is not None:
                whole.digests.pop(self, None)
                if not whole.digests:
                    model.whole.pop(key).end()
                    model.handles.note([whole.name])
        for model in self._models:
            model.align_trainable()
            model.copies.wait()
        for module in self._modules:
            FSDPModule.reshard(module)

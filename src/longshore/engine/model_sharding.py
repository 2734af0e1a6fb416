"""Stage 3: shard the model with torch's FSDP2, unit by unit, and replace the user's parameters by shards; on one rank,
let parameters rest on the host where that is configured."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from longshore.engine.config.model import Config
from longshore.engine.ranks import Ranks
from longshore.engine.weights import Weights, with_memory, without_memory
from longshore.optim.dtensor import is_sharded, replace_by_shards
from longshore.optim.parameters import has_hooks
from longshore.torch_versions import require
from longshore.units import WrapPolicy, units_with_leaves

if TYPE_CHECKING:
    from longshore.stage3.fsdp import FullyShardedModel
    from longshore.streaming import Stream


def shard_model(
    model: nn.Module,
    wrap_policy: WrapPolicy | None,
    config: Config,
    ranks: Ranks,
    weights: Weights,
    client: Optimizer | None = None,
    groups: Sequence[dict[str, Any]] = (),
) -> FullyShardedModel | None:
    """Apply FSDP2 at stage 3 on several ranks, and return None otherwise; all ranks have to call.

    The model's parameters, from any device, become DTensors on this rank's device, with their first ``weights``. They
    also replace the former parameters in ``client``, the user's optimizer, and in ``groups`` of ``(name, parameter)``.
    ``wrap_policy`` is as in :func:`units_of`; None: the configuration's.

    Raises:
        ValueError: torch is too old, or a parameter (which is named) or the policy is not supported.
    """
    if config.stage < 3 or ranks.world_size == 1:
        if wrap_policy is not None and config.stage < 3:
            raise ValueError(f"wrap_policy is for stage 3, and the stage is {config.stage}; leave it out")
        return None
    require("stage 3")
    # Imported here: FSDP2 takes a while to import, and only stage 3 needs it.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        OffloadPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    from longshore.stage3.fsdp import FullyShardedModel

    rest = rest_device(config, ranks)
    former = dict(model.named_parameters())
    _check_parameters(former, scalars=isinstance(model, FSDPModule))
    if not isinstance(model, FSDPModule):
        policy = config.wrap_policy if wrap_policy is None else wrap_policy
        units = units_with_leaves(model, policy, _leaves_of(model, config))
        mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
        without_memory(model)
        offload = OffloadPolicy() if rest == ranks.device else CPUOffloadPolicy()
        for module in (*units, model):
            fully_shard(module, mesh=mesh, offload_policy=offload)
        if callable(getattr(model, "generate", None)):
            # transformers' generate() calls parts of the model, such as an encoder, before the model: parameters
            # that belong to no unit have to be gathered by then.
            register_fsdp_forward_method(model, "generate")
    with_memory(model, rest, pinned=rest != ranks.device)
    sharded = FullyShardedModel(model)
    if rest != ranks.device:
        from longshore.streaming import leave_behind_on_fork

        leave_behind_on_fork(sharded, list(model.parameters()))
    present = dict(model.named_parameters())
    _replace_parameters({id(each): present[name] for name, each in former.items()}, client, groups)
    replaced = {name: each for name, each in former.items() if each is not present[name]}
    weights.fill(sharded, replaced, ranks)
    replace_by_shards((each, present[name]) for name, each in replaced.items())
    sharded.handles.note(present)  # of an engine before this one, too
    return sharded


def rest_device(config: Config, ranks: Ranks) -> torch.device:
    """Return where this rank's parameters are between calls of the model."""
    return ranks.device if config.param_device == "none" else torch.device("cpu")


def stream_model(
    model: nn.Module, wrap_policy: WrapPolicy | None, config: Config, ranks: Ranks, undo: ExitStack
) -> Stream | None:
    """Let a model's parameters rest on the host, on one rank, if that is configured and they would not be there anyway.

    Arguments and errors are as in :func:`shard_model`; ``undo`` makes it a plain model on the CPU again.
    """
    if config.param_device == "none" or ranks.device.type == "cpu" or ranks.world_size > 1:
        return None
    policy = config.wrap_policy if wrap_policy is None else wrap_policy
    chosen = {id(unit) for unit in units_with_leaves(model, policy, _leaves_of(model, config))}
    if not chosen:
        raise ValueError(
            f"offload_param copies a model to the device unit by unit, and {type(model).__name__} has no modules that "
            "repeat; name the classes of its units in longshore.wrap_policy, or give a number of elements there"
        )
    from longshore.streaming import stream

    streamed = stream(model, ranks.device, blocks=lambda _, module: id(module) in chosen)
    undo.callback(streamed.close)
    return streamed


def _check_parameters(parameters: Mapping[str, Tensor], scalars: bool) -> None:
    for name, parameter in parameters.items():
        if has_hooks(parameter):
            raise ValueError(
                f"parameter {name} has a hook on its gradient, which comes in another tensor where parameters are "
                "sharded; hook the module (register_full_backward_hook), or use stage 2"
            )
        if parameter.ndim == 0 and not scalars:
            raise ValueError(f"parameter {name} has no dimension, and FSDP2 cannot shard it; give it the shape [1]")
        if not parameter.is_contiguous():
            raise ValueError(
                f"parameter {name} is not contiguous (its strides are {parameter.stride()}), and FSDP2 cannot shard "
                "it; give the module nn.Parameter(parameter.detach().contiguous()), or use stage 2"
            )


def _replace_parameters(
    present: Mapping[int, Tensor], client: Optimizer | None, groups: Sequence[dict[str, Any]]
) -> None:
    """Replace a model's former parameters by sharded ones; ``present`` has these by the ``id`` of the former."""
    for group in groups:
        group["params"] = [(name, present.get(id(each), each)) for name, each in group["params"]]
    if client is not None:
        for group in client.param_groups:
            group["params"] = [present.get(id(each), each) for each in group["params"]]
        for each in list(client.state):
            client.state[present.get(id(each), each)] = client.state.pop(each)


def check_already_sharded(model: nn.Module, config: Config, ranks: Ranks, dtype: torch.dtype | None) -> bool:
    """Return whether ``fully_shard`` was applied to the model, by the user or for an engine before this one; a
    parameter that was frozen or thawed since then counts from here on.

    Raises:
        ValueError: parameters are sharded in a way that the engine, the number of ranks or the configuration rules out,
            or they are gathered now.
    """
    if is_fully_sharded(model):
        require("stage 3")
        from longshore.stage3.fsdp import align_trainable, check_not_gathered, members_of

        check_not_gathered(model)
        align_trainable(members_of(model))
    sharded = {name: parameter for name, parameter in model.named_parameters() if is_sharded(parameter)}
    if not sharded:
        return False
    first = next(iter(sharded))
    if not is_fully_sharded(model):
        raise ValueError(
            f"parameter {first} is a DTensor, and fully_shard was not applied to the model; after parallelize_module, "
            "apply it to the whole model last, with the mesh of the other dimensions, or leave both out"
        )
    for name, _ in model.named_parameters():
        if name not in sharded:
            raise ValueError(
                f"fully_shard was applied to a part of the model, and parameter {name} is not in it; apply it to the "
                "whole model last, or leave all of it to initialize()"
            )
    if config.stage < 3:
        raise ValueError(
            f"parameter {first} is a DTensor: fully_shard was applied to the model, and the stage is {config.stage}; "
            "set it to 3"
        )
    if ranks.world_size == 1:
        raise ValueError(f"parameter {first} is a DTensor, and there is one rank; leave fully_shard out with one rank")
    resting, on_host = config.param_device == "cpu", sharded[first].device.type == "cpu"
    if ranks.device.type != "cpu" and resting != on_host:
        raise ValueError(
            f"fully_shard was applied to the model, and its parameters rest on the {'host' if on_host else 'device'}, "
            f"while offload_param.device is {config.param_device}; set it to {'cpu' if on_host else 'none'}, or "
            f"{'leave out' if on_host else 'give'} offload_policy=CPUOffloadPolicy() where fully_shard is called"
        )
    for name, parameter in sharded.items():
        if dtype is not None and parameter.is_floating_point() and parameter.dtype != dtype:
            raise ValueError(
                f"parameter {name} is {parameter.dtype} and the configuration wants {dtype}; convert the model before "
                "fully_shard"
            )
    return True


def is_fully_sharded(model: nn.Module) -> bool:
    """Return whether ``fully_shard`` was applied to the model, or to a module in it."""
    module = sys.modules.get("torch.distributed.fsdp")  # if it was never imported, it was never applied
    return module is not None and any(isinstance(each, module.FSDPModule) for each in model.modules())


def tensor_parallel_size(model: nn.Module) -> int:
    """Return how many ranks run each batch together: 1 unless the model was sharded after tensor parallelism."""
    if not is_fully_sharded(model):
        return 1
    require("stage 3")
    from longshore.stage3.fsdp import tensor_parallel_size

    return tensor_parallel_size(model)


def data_parallel(ranks: Ranks, sharded: FullyShardedModel | None) -> Ranks:
    """Return ``ranks`` counted by the batches that they run; ranks that run a batch together have one index."""
    if sharded is None:
        return ranks
    alike = sharded.grid.alike(sharded.tp_rank)
    return replace(ranks, rank=alike.index(ranks.rank), world_size=len(alike))


def _leaves_of(model: nn.Module, config: Config) -> list[nn.Module]:
    """Return the modules that the configuration wants gathered whole.

    Raises:
        ValueError: it names some, and the model has none of them.
    """
    found = named_leaves(model, config)
    if not found and (wanted := [*config.leaf_classes, *config.leaf_names, *config.leaf_name_suffixes]):
        raise ValueError(
            f"leaf_module names {', '.join(wanted)}, and the model has no such module; correct it, or leave it out"
        )
    return found


def named_leaves(model: nn.Module, config: Config) -> list[nn.Module]:
    """Return the modules of the model that the configuration names as leaves."""
    classes, names, suffixes = {*config.leaf_classes}, {*config.leaf_names}, config.leaf_name_suffixes
    return [
        module
        for name, module in model.named_modules()
        if {type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}"} & classes
        or name in names
        or name.endswith(suffixes)
    ]

"""``make``: from a model and a configuration to an engine."""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from longshore.byte_sizes import LEAST_BUDGET
from longshore.engine.access import register
from longshore.engine.activation_checkpointing import install, is_configured
from longshore.engine.binding import Binding, bind, host_cpus
from longshore.engine.config.model import Config, checked_config
from longshore.engine.data import make_loader
from longshore.engine.engine import Engine
from longshore.engine.model_sharding import (
    check_already_sharded,
    data_parallel,
    rest_device,
    shard_model,
    stream_model,
    tensor_parallel_size,
)
from longshore.engine.monitoring import check_installed
from longshore.engine.optimizers import client_optimizer, make_optimizer, take_over
from longshore.engine.precision import DTYPES
from longshore.engine.ranks import Ranks, expected_world_size, join
from longshore.engine.schedules import adopt_schedule, make_schedule
from longshore.engine.sharded_offload import ShardedOffload
from longshore.engine.weights import Weights, first_weights
from longshore.errors import RankError
from longshore.optim import Offload
from longshore.optim.grad_placeholder import put_gradient
from longshore.optim.tiled_optimizer import TiledOptimizer, core_of
from longshore.store.rounds import ReductionSettings
from longshore.tiles import memory_for_speculation
from longshore.transfer import DeviceStreams
from longshore.units import WrapPolicy

if TYPE_CHECKING:
    from longshore.stage3.fsdp import FullyShardedModel

E = TypeVar("E", bound=Engine)


def make(
    model: nn.Module,
    config: Config,
    optimizer: Optimizer | Callable[[list[Any]], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    *,
    offload: Offload | None = None,
    wrap_policy: WrapPolicy | None = None,
    weights: str | os.PathLike[str] | None = None,
    device: str | torch.device | None = None,
    environ: Mapping[str, str] | None = None,
    notes: Iterable[str] = (),
    kind: Callable[..., E] = Engine,
) -> E:
    """Make an engine, under any launcher or in an existing process group; its arguments are ``longshore.initialize``'s.

    Args:
        environ: the variables that identify this rank. None: the process's.
        notes: sentences about the configuration that rank 0 shows as warnings.
        kind: makes the engine: its class, or a function with the same arguments.

    Raises:
        ConfigError: the configuration is wrong; the message lists all problems.
        ValueError, TypeError: an argument, named in the message, is not supported.
    """
    environ = os.environ if environ is None else environ
    check_model(model)
    config = checked_config(config, data_ranks(model, environ), needs_optimizer=optimizer is None)
    check_installed(config)
    ranks, settings = join(device=device, environ=environ), _with_states_of(offload, config)
    with contextlib.ExitStack() as undo:
        undo.callback(ranks.close)
        for note in notes if ranks.rank == 0 else ():
            warnings.warn(note, stacklevel=4)  # of the script, by way of a door
        # Bind before memory is allocated, so that it comes from the NUMA node of this rank's CPUs.
        binding = bind(settings, ranks, environ)
        undo.callback(binding.release)
        first = _place(model, settings, ranks, weights)
        client, groups = client_optimizer(model, optimizer, model_parameters, settings, show=ranks.rank == 0)
        sharded = shard_model(model, wrap_policy, settings, ranks, first, client, groups)
        first.close()
        streamed = stream_model(model, wrap_policy, settings, ranks, undo)
        chosen = _offload_over(settings, ranks, offload, sharded, binding)
        made = make_optimizer(model, client, groups, settings, chosen)
        undo.callback(made.close)  # or its hooks would take gradients of the model's next optimizer
        _prepare(made, ranks, sharded)
        engine = kind(model, made, settings, ranks, binding)
        engine._stream = streamed
        engine.lr_scheduler = _schedule(lr_scheduler, settings, made, client)
        if training_data is not None:
            engine.training_dataloader = _loader(training_data, engine, data_parallel(ranks, sharded), collate_fn)
        take_over(client, made)  # last: where make() fails, the user's optimizer stays as it was
        undo.pop_all()
    if settings.dump_state:
        engine.explain()
    return engine


def _loader(data: Any, engine: Engine, share: Ranks, collate_fn: Any) -> Any:
    return make_loader(data, engine.train_micro_batch_size_per_gpu(), share, collate_fn, engine.config.drop_last)


def _with_states_of(offload: Offload | None, config: Config) -> Config:
    """Return the configuration with the states of the user's own ``offload``, so that ranks are compared by them, and
    checkpoints say them.

    Raises:
        ValueError: the configuration asks for others.
    """
    if offload is None:
        return config
    for name in ("states", "states_seed"):
        wanted, given = getattr(config, name), getattr(offload, name)
        if wanted not in (given, Config.model_fields[name].default):
            raise ValueError(
                f"the configuration has {name}={wanted!r}, and offload=, which replaces its settings of the host, has "
                f"{name}={given!r}: give Offload({name}={wanted!r}), or leave {name} out of the configuration"
            )
    return config.model_copy(update={"states": offload.states, "states_seed": offload.states_seed})


def _place(model: nn.Module, settings: Config, ranks: Ranks, path: str | os.PathLike[str] | None) -> Weights:
    """Convert the model and move it to this rank's device with its first weights. A model that is, or will be, sharded
    gets its weights when its shards are made."""
    dtype = None if settings.dtype is None else DTYPES[settings.dtype]
    sharded = check_already_sharded(model, settings, ranks, dtype)
    for parameter in model.parameters() if dtype is not None and not sharded else ():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)  # the same object; buffers keep their dtype
    tensors = [*model.named_parameters(), *model.named_buffers()]
    setup = {
        "configuration": (f"{name}={value!r}" for name, value in settings.model_dump().items()),
        "model": (f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors),
        "choice of trainable parameters": (name for name, tensor in tensors if tensor.requires_grad),
    }
    _check_same(setup, ranks, "build the same model and give initialize() the same configuration")
    in_shards = sharded or (settings.stage == 3 and ranks.world_size > 1)
    weights = first_weights(model, path, ranks, in_shards)
    if path is not None or not sharded:
        weights.place(model, ranks, rest_device(settings, ranks), parameters=not in_shards)
    if settings.cpu_checkpointing and not is_configured():
        install(cpu_checkpointing=True)
    return weights


def data_ranks(model: nn.Module, environ: Mapping[str, str]) -> int:
    """Return how many ranks run different batches; raise ValueError if the variables contradict each other."""
    return max(1, expected_world_size(environ) // tensor_parallel_size(model))


def check_model(model: Any) -> nn.Module:
    """Return the model if an engine can train it.

    Raises:
        TypeError, ValueError: it is none, or something trains it already.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"initialize() needs model=, a torch.nn.Module, not {type(model).__name__}")
    from longshore.streaming import streams_of  # streaming imports Dynamo, which takes seconds

    if streams := streams_of(model.parameters()):
        raise ValueError(
            f"{type(model).__name__} is streamed to {streams[0].device} already: leave out longshore.stream() and let "
            "the engine stream it (stage 3 with offload_param), or call destroy() of the engine that does"
        )
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.parallel.DistributedDataParallel) or kind == "FullyShardedDataParallel":
            which = f"module {name} of the model" if name else "the model"
            raise ValueError(
                f"{which} is a {kind}, which reduces gradients itself, as the engine does: give initialize() the "
                "module inside it"
            )
    return model


def _offload_over(
    config: Config, ranks: Ranks, offload: Offload | None, sharded: FullyShardedModel | None, binding: Binding
) -> Offload:
    """Choose where the state is kept: all of it on a single rank, or sharded over several ranks."""
    if offload is None:
        offload = _offload(config, ranks, binding)
    if ranks.world_size == 1:
        return offload
    averaged = data_parallel(ranks, sharded).world_size
    reduction = ReductionSettings(
        stage=config.stage,
        reduced_numel=config.reduce_bucket_numel,
        early=config.overlap_comm,
        wire_dtype=DTYPES[config.communication_dtype] if config.communication_dtype else None,
        sum_dtype=DTYPES[config.accumulation_dtype],
        predivide=float(averaged) if config.prescale_gradients else config.gradient_predivide_factor,
    )
    if rest_device(config, ranks) != ranks.device and offload.transfer is None:
        offload = replace(offload, transfer=DeviceStreams.to_host(ranks.device, publishes=False))
    return ShardedOffload.over(
        offload,
        group=ranks.group,
        reduction=reduction,
        gather_numel=config.allgather_bucket_numel,
        sharded=sharded,
        reduce_device=ranks.device,
    )


def _offload(config: Config, ranks: Ranks, binding: Binding) -> Offload:
    """Choose the settings of this rank's host side, which shares the machine's CPUs and memory with other ranks."""
    place, ahead = config.offload_device, config.speculation_memory
    common: dict[str, Any] = {
        name: getattr(config, name) for name in ("states", "states_seed", "detect_writes", "tile_numel", "accumulate")
    }
    if place == "none" and ranks.device.type != "cpu":
        return Offload(threads=config.threads, cpu_set=config.cpu_set, device=place, **common)
    neighbours = binding.neighbours
    if ahead == "auto" and neighbours.on_machine > 1:
        ahead = max(LEAST_BUDGET, memory_for_speculation() // neighbours.on_machine)
    threads, cpu_set = host_cpus(config, neighbours, binding.host_threads)
    return Offload(
        threads=threads,
        cpu_set=cpu_set,
        device=place,
        speculation_memory=ahead,
        ratio=config.offload_ratio,
        **common,
    )


def _prepare(optimizer: TiledOptimizer, ranks: Ranks, sharded: FullyShardedModel | None) -> None:
    """Check and connect a new optimizer, and discard gradients that another loop has left (law 2)."""
    records = core_of(optimizer).members.records
    # Buckets are filled in this order. Another order on some rank, such as that of set(model.parameters()), would add
    # up gradients of different parameters.
    order = {
        "order of the optimizer's parameters": (
            f"{record.name} {list(record.shape)} {record.dtype}" for record in records
        ),
        "division into groups": (str(len(group["params"])) for group in optimizer.param_groups),
    }
    duty = "give its optimizer the same parameters in the same order (a list, never a set) and groups"
    _check_same(order, ranks, duty)
    if not records:
        raise ValueError("the optimizer has no parameters, so that there is nothing to train: thaw some before")
    left = [record for record in records if record.has_gradient]
    for record in left:
        put_gradient(record, None)
    if left:
        warnings.warn(
            f"initialize() discarded the gradients that {len(left)} parameters still had ({left[0].name} and others); "
            "call zero_grad() at the end of a loop of your own",
            stacklevel=5,
        )
    register(optimizer)
    if sharded is not None:
        made = weakref.ref(optimizer)  # the model has this hook until the engine is closed, and must not keep it

        def hook_unfrozen() -> None:
            if (alive := made()) is not None:
                core_of(alive).members.source.hook_unfrozen()

        sharded.when_gathered(hook_unfrozen)


def _schedule(given: Any, config: Config, optimizer: Optimizer, client: Optimizer | None) -> Any:
    if given is None:
        return None if config.scheduler is None else make_schedule(config.scheduler, optimizer)
    if config.scheduler is not None:
        raise ValueError("a scheduler is given twice: as lr_scheduler= and in the configuration; keep one")
    return adopt_schedule(given, optimizer, client)


def _check_same(parts: Mapping[str, Iterable[str]], ranks: Ranks, duty: str) -> None:
    """Raise RankError, with parts and ranks, unless the parts are the same on all ranks (law 11); all have to call."""
    lines = {what: [*each] for what, each in parts.items()}
    digests = {what: hashlib.blake2b("\n".join(each).encode(), digest_size=16).digest() for what, each in lines.items()}
    rows = ranks.gather(digests)
    for what in digests:
        differing = [rank for rank, row in enumerate(rows) if row[what] != rows[0][what]]
        if differing:  # seen by all ranks alike, so that all gather again
            every = ranks.gather(lines[what])
            first, other = _first_difference(every[0], every[differing[0]])
            raise RankError(
                f"the {what} of rank {', '.join(map(str, differing))} is not that of rank 0 "
                f"({other!r} in place of {first!r}); every rank has to {duty}"
            )


def _first_difference(first: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    pairs = zip_longest(first, other, fillvalue="nothing more")
    return next((mine[:200], its[:200]) for mine, its in pairs if mine != its)

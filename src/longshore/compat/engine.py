"""``longshore.Engine`` and ``longshore.initialize``: the engine with DeepSpeed's files, calls and names."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from longshore import Config, Offload, gather
from longshore.compat.config.watch import ConfigWatch
from longshore.engine.config import load_config
from longshore.seam import (
    DTYPES,
    Answer,
    Binding,
    Ranks,
    TiledOptimizer,
    TrainingLoader,
    WrapPolicy,
    check_model,
    data_ranks,
    is_sharded,
    make,
    make_loader,
    with_port,
)
from longshore.seam import Engine as CoreEngine

_NO_MODEL_PARALLELISM = "longshore shards over data-parallel ranks only; use engine.compile()"
INSTEAD = {
    "offload_states": 'optimizer states are where offload_optimizer says; "cpu" keeps them off the device for good',
    "reload_states": "states are never offloaded for a while only; leave the call out",
    "load_universal_checkpoint": "load_checkpoint() takes a checkpoint of any number of ranks",
    "allreduce_gradients": "engine.step() reduces what is left; between backwards longshore.utils.safe_get_full_grad "
    "does",
    "compile_autosp": _NO_MODEL_PARALLELISM,
    "compile_autotp": _NO_MODEL_PARALLELISM,
    "tput_timer": "engine.global_samples counts samples; longshore.trace() measures",
    "flops_profiler": "enable it in the configuration, or use torch.utils.flop_counter",
    "monitor": "write figures with the logger of your choice after engine.step()",
}
"""Names that the engine does not have, with the reason or the replacement."""


class BatchInfo(NamedTuple):
    """Samples per step, samples per backward on one rank, and backwards per step."""

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int


class CallableFloat(float):
    """A number that returns itself when called: DeepSpeed's engine has a method ``loss_scale()``."""

    def __call__(self) -> float:
        return float(self)


T = TypeVar("T")


def _configured(read: Callable[[Config], T]) -> Callable[[Any], T]:
    """Make a method without arguments that reads the configuration."""
    return lambda self: read(self.config)


class Engine(CoreEngine):
    """A model with its optimizer, as :func:`longshore.initialize` returns it.

    ``engine(batch)``, ``engine.backward(loss)``, ``engine.step()``: with several ranks, every rank makes the same calls
    in the same order. It has names of DeepSpeed's engine, too; other attributes are looked up in the model. Assigning
    one that the model has sets it there; parts of the engine and values of its configuration cannot be assigned.
    """

    _where_else = (
        "settings are in engine.config, and docs/from_deepspeed.md lists the names of DeepSpeed's engine that this one "
        "has"
    )

    def __init__(
        self,
        module: nn.Module,
        optimizer: TiledOptimizer,
        config: Config,
        ranks: Ranks,
        binding: Binding,
        watch: ConfigWatch,
    ) -> None:
        super().__init__(module, optimizer, config, ranks, binding)
        self._watch = watch
        watch.begin()
        self._file: Mapping[str, Any] = {}
        """Content of a DeepSpeed file, where DeepSpeed's names are to be answered by it."""
        self._client_name = ""
        """Name of the class of the optimizer that was passed to ``initialize()``."""

    def __getattr__(self, name: str) -> Any:
        if name in INSTEAD:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}; {INSTEAD[name]}")
        return super().__getattr__(name)

    def _check_kept(self) -> None:
        self._watch.check()
        super()._check_kept()

    # -- weights --------------------------------------------------------------

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write whole weights in the dtype in which they train, on rank 0; at stage 3 all ranks have to call.

        Args:
            save_dir: the folder, which is created if it does not exist.
            save_filename: written as safetensors if it ends with ``.safetensors``, otherwise for ``torch.load``.
            exclude_frozen_parameters: leave out frozen parameters.

        Returns:
            True.
        """
        weights = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        if weights is not None:
            save_weights(weights, Path(save_dir) / save_filename)
        return True

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Return whole weights on the CPU on rank 0, and None on the others. At stage 3 all ranks have to call.

        Tied tensors are copied once for all of their names; each module's shards are gathered in turn.
        """
        keep = self.ranks.rank == 0
        state = self.module.state_dict(keep_vars=True)
        wanted = {id(each) for each in state.values() if isinstance(each, Tensor)}
        copies: dict[int, Tensor | None] = {}
        for module in self.module.modules():
            own = [each for each in module.parameters(recurse=False) if id(each) in wanted and id(each) not in copies]
            with gather(own) if any(map(is_sharded, own)) else contextlib.nullcontext(own) as whole:
                for parameter, values in zip(own, whole, strict=True):
                    left_out = exclude_frozen_parameters and not parameter.requires_grad
                    copies[id(parameter)] = values.detach().to("cpu", copy=True) if keep and not left_out else None
        if not keep:
            return None
        found = {}
        for name, value in state.items():
            if isinstance(value, Tensor) and id(value) not in copies:
                copies[id(value)] = value.detach().to("cpu", copy=True)
            copy = copies[id(value)] if isinstance(value, Tensor) else value
            if copy is not None:
                found[name] = copy
        return found

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the model's own ``state_dict()``; at stage 3 on several ranks it has shards (``DTensor``)."""
        frozen = {id(each) for each in self.module.parameters() if not each.requires_grad}
        state = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=True)
        for name in list(state):
            if exclude_frozen_parameters and id(state[name]) in frozen:
                del state[name]
            elif isinstance(state[name], Tensor) and not keep_vars:
                state[name] = state[name].detach()
        return state

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> None:
        """Load whole weights, the same on all ranks, at any stage; masters are set from them at the next step.

        Args:
            checkpoint: a state dict of the model, or a dictionary with one under ``"module"``.
            strict: as in torch.
            custom_load_fn: called with ``src`` and ``dst``, the state dict and the model, in place of torch's loading.
        """
        state, model = checkpoint.get("module", checkpoint), self.module
        if custom_load_fn is not None:
            custom_load_fn(src=state, dst=model)
        elif not any(map(is_sharded, model.parameters())):
            model.load_state_dict(state, strict=strict)
        else:
            # Imported here: the import takes a while, and only shards need it.
            from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

            set_model_state_dict(model, dict(state), options=StateDictOptions(full_state_dict=True, strict=strict))

    def empty_partition_cache(self) -> None:
        """Free the parameters that stage 3 has gathered on this rank; the next use gathers them again. At other stages
        nothing is gathered."""
        self._store.residence.free()

    @Answer
    def is_compiled(self) -> bool:
        return getattr(self.module, "_compiled_call_impl", None) is not None

    # -- numbers --------------------------------------------------------------

    def get_batch_info(self) -> BatchInfo:
        """Return the three batch numbers; the first is the product of the others and the number of ranks."""
        sizes = self._accumulation.sizes
        return BatchInfo(sizes.train_batch_size, sizes.micro_batch_size, sizes.accumulation_steps)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the samples per backward on one rank, as the engine counts them; ``training_dataloader`` keeps its own.

        The accumulation steps stay, so the train batch size changes.
        """
        self._accumulation.sizes = self._accumulation.sizes.with_micro_batch_size(micro_batch_size)

    def get_mom(self) -> list[Any]:
        """Return the betas, or the momentum, of each group."""
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    @Answer
    def loss_scale(self) -> CallableFloat:
        """Factor by which a loss is multiplied before backward, 1.0 without a scaler; it may also be called."""
        return CallableFloat(self.loss_scaling.value)

    cur_scale = loss_scale

    @Answer
    def local_rank(self) -> int:
        """Index of this rank on its machine."""
        return self.ranks.local_rank

    @Answer
    def global_rank(self) -> int:
        """Index of this rank in the run."""
        return self.ranks.rank

    @Answer
    def dp_world_size(self) -> int:
        """Number of ranks that run different batches."""
        return self._accumulation.sizes.world_size

    @Answer
    def mp_world_size(self) -> int:
        """Number of ranks that run each batch together."""
        return self.ranks.world_size // self._accumulation.sizes.world_size

    @Answer
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """The group of all ranks; None for one rank that needs no group."""
        return self.ranks.group

    # -- the configuration ----------------------------------------------------

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtype of parameters, and the dtype in which gradients are accumulated."""
        parameters = DTYPES[self.config.dtype] if self.config.dtype else torch.float32
        return parameters, DTYPES[self.config.accumulation_dtype]

    @Answer
    def communication_data_type(self) -> torch.dtype:
        """Dtype in which gradients travel between ranks."""
        name = self.config.communication_dtype
        return DTYPES[name] if name else self.get_data_types()[0]

    def optimizer_name(self) -> str:
        """Return the configured type in lower case, or the name of the class that was passed to initialize()."""
        if self.config.optimizer is None:
            return self._client_name or type(self.optimizer).__name__
        return str(self._in_file("optimizer", "type") or self.config.optimizer.type).lower()

    def optimizer_params(self) -> dict[str, Any] | None:
        """Return the parameters in the file, or all of a :class:`longshore.Config`'s; None if none is configured."""
        optimizer = self.config.optimizer
        return optimizer and (self._in_file("optimizer", "params") or optimizer.arguments())

    def scheduler_params(self) -> dict[str, Any] | None:
        """Return the parameters in the file, or all of a :class:`longshore.Config`'s; None if none is configured."""
        scheduler = self.config.scheduler
        return scheduler and (self._in_file("scheduler", "params") or scheduler.arguments())

    def _in_file(self, section: str, name: str) -> Any:
        return (self._file.get(section) or {}).get(name)

    scheduler_name = _configured(lambda config: config.scheduler and config.scheduler.type)
    fp16_enabled = _configured(lambda config: "fp16" in (config.dtype, config.autocast))
    bfloat16_enabled = _configured(lambda config: config.dtype == "bf16")
    dynamic_loss_scale = _configured(
        lambda config: config.loss_scaling is not None and config.loss_scaling.scale is None
    )
    gradient_clipping = _configured(lambda config: config.gradient_clipping or 0.0)
    gradient_predivide_factor = _configured(lambda config: config.gradient_predivide_factor)
    zero_optimization_stage = _configured(lambda config: config.stage)
    zero_optimization = _configured(lambda config: config.stage > 0)
    zero_optimization_partition_gradients = _configured(lambda config: config.stage >= 2)
    zero_optimization_partition_weights = _configured(lambda config: config.stage >= 3)
    zero_gather_16bit_weights_on_model_save = _configured(lambda config: config.gather_on_save)
    zero_cpu_offload = _configured(lambda config: config.offload_device == "cpu")
    wall_clock_breakdown = _configured(lambda config: config.wall_clock_breakdown)
    steps_per_print = _configured(lambda config: config.steps_per_print)

    # -- data -----------------------------------------------------------------

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> TrainingLoader[Any]:
        """Make a loader of this rank's part of a dataset, like the one for ``training_data``.

        Args:
            batch_size: samples per batch; None: the micro batch size.
            route: ``"train"`` shuffles, ``"eval"`` and ``"predict"`` keep the order.
            pin_memory: accepted; batches for a CUDA device are always pinned.
            data_sampler: rejected.
            num_local_io_workers: number of processes that read ahead; None: 0.

        Raises:
            ValueError: a sampler is given, or the route is unknown.
        """
        if data_sampler is not None:
            raise ValueError(
                "deepspeed_io() splits the data over the ranks itself; with a sampler of your own make a "
                "torch.utils.data.DataLoader"
            )
        if route not in ("train", "eval", "predict"):
            raise ValueError(f"route is 'train', 'eval' or 'predict', not {route!r}")
        return make_loader(
            dataset,
            self._accumulation.sizes.micro_batch_size if batch_size is None else batch_size,
            self.ranks,
            collate_fn,
            self.config.drop_last,
            num_local_io_workers or 0,
            0 if route == "train" else None,
        )


E = TypeVar("E", bound=Engine)


class Initialized(NamedTuple):
    """The four results of :func:`initialize`, in the order that scripts unpack."""

    engine: Engine
    optimizer: TiledOptimizer
    training_dataloader: Any
    lr_scheduler: Any


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[list[Any]], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None,
    mesh_param: Any = None,
    config_params: Any = None,
    *,
    offload: Offload | None = None,
    wrap_policy: WrapPolicy | None = None,
    weights: str | os.PathLike[str] | None = None,
    device: str | torch.device | None = None,
) -> Initialized:
    """Make an engine, under any launcher or in an existing process group; the signature is ``deepspeed.initialize``'s.

    Args:
        args: an object that may have ``deepspeed_config``, a path, if ``config`` is not given.
        model: the model, which is moved to this rank's device and cast as configured; it stays the same object.
        optimizer: as for :func:`longshore.from_client`, or a function from parameters to one. None: as configured.
        model_parameters: parameters or groups for that optimizer; None: all that are trainable.
        training_data: a dataset, for the third result.
        lr_scheduler: a scheduler of ``optimizer``, or a function from an optimizer to one. None: as configured.
        distributed_port: port of rank 0, if no launcher names one.
        mpu: model parallelism; rejected.
        dist_init_required: False: the process group has to exist already.
        collate_fn: a function from a list of samples to a batch, for the loader of ``training_data``.
        config: a path to a DeepSpeed JSON file, its content, or a :class:`longshore.Config`.
        mesh_param: rejected, as ``mpu`` is.
        config_params: the old name of ``config``.
        offload: settings of host side and states in place of the configuration's (tests pass a simulated transfer).
        wrap_policy: at stage 3, which modules are gathered, or copied to the device, whole: as in the configuration's
            ``longshore.wrap_policy``, or a function of name and module. None: the configuration's.
        weights: a safetensors file or a folder of them, for a model that may be on the meta device. None: rank 0's.
        device: where this rank trains. None: the local rank's CUDA device if there is CUDA, else the CPU.

    Returns:
        Engine, its optimizer, the loader or None, the scheduler or None.

    Raises:
        ConfigError: the configuration is wrong; the message lists all problems.
        ValueError, TypeError: an argument, named in the message, is not supported.
    """
    engine = make_by_file(
        Engine,
        (config, config_params, getattr(args, "deepspeed_config", None)),
        model,
        distributed_port,
        dist_init_required,
        {"mpu": mpu, "mesh_param": mesh_param},
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        collate_fn=collate_fn,
        offload=offload,
        wrap_policy=wrap_policy,
        weights=weights,
        device=device,
    )
    return Initialized(engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler)


def make_by_file(
    kind: type[E],
    configs: Iterable[Any],
    model: nn.Module | None,
    port: int | None,
    required: bool | None,
    unsupported: Mapping[str, Any],
    *,
    optimizer: Any,
    given: Any = None,
    **arguments: Any,
) -> E:
    """Make an engine of this class by the only one of ``configs``: a file, its content, or a :class:`longshore.Config`.

    Args:
        port, required: ``distributed_port`` and ``dist_init_required``.
        unsupported: arguments that have to be None, by name.
        given: the mapping that is watched for changes, if it is another one than the configuration.
        optimizer, arguments: those of the core's ``make``.
    """
    checked = check_model(model)
    for name, value in unsupported.items():
        if value is not None:
            raise ValueError(f"{name} is not supported: longshore shards over data-parallel ranks only; leave it out")
    environ = _environ(port, required)
    config, ranks = _only(configs), data_ranks(checked, environ)
    watching = functools.partial(kind, watch=ConfigWatch(config if given is None else given))
    # Read before the ranks meet, so that a mistake in a file is reported without waiting for the others.
    loaded = load_config(config, world_size=ranks, needs_optimizer=optimizer is None)
    return make(checked, loaded.config, optimizer, environ=environ, notes=loaded.notes, kind=watching, **arguments)


def _environ(port: int | None, required: bool | None) -> Mapping[str, str]:
    """Return the variables that identify this rank."""
    if required is False and not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "dist_init_required=False, and no process group is initialised; initialise it, or leave the argument out"
        )
    return with_port(port)


def _only(configs: Iterable[Any]) -> Any:
    given = [config for config in configs if config is not None]
    if len(given) != 1:
        raise ValueError(
            "initialize() needs config=: a path, a dictionary, or a longshore.Config"
            if not given
            else "the configuration is given twice: as config=, config_params= or args.deepspeed_config; keep config="
        )
    return given[0]


def save_weights(weights: Mapping[str, Any], path: Path) -> None:
    """Write a state dict: as safetensors if ``path`` ends so (tied tensors once), otherwise for ``torch.load``.

    The file is written atomically: it gets its name when it is complete.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.writing-{secrets.token_hex(4)}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import save_file

            once = {id(each): name for name, each in reversed(list(weights.items()))}  # the first name of each
            own = {name: each.contiguous() for name, each in weights.items() if once[id(each)] == name}
            save_file(own, draft, {"format": "pt"})
        else:
            torch.save(dict(weights), draft)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config PATH``, which ``initialize(args=...)`` reads."""
    group = parser.add_argument_group("longshore", "the engine's configuration")
    group.add_argument("--deepspeed", action="store_true", help="accepted; scripts ask for the engine with it")
    group.add_argument("--deepspeed_config", default=None, help="a configuration file")
    return parser

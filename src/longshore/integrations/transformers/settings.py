"""One configuration from two sources, ``TrainingArguments`` and ours, which must not contradict each other."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from longshore import Config, ConfigError
from longshore.compat.config.agreement import ArgumentValue, contradictions, settle, settle_config
from longshore.compat.config.load import read_config
from longshore.compat.config.reading import Reading
from longshore.engine.config import SchedulerConfig, load_config

_ADAMS = ("adam", "adamw", "fusedadam", "deepspeedcpuadam", "cpuadam", "muon")
_DEFAULT = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


class TrainerSettings:
    """The engine's configuration, made from a longshore configuration and the Trainer's arguments.

    Values that are ``"auto"`` in the file come from the arguments, and so do those of batch sizes, clipping, precision
    and the optimizer's hyperparameters that the file leaves out.

    Args:
        config: a path, a dictionary, or a :class:`longshore.Config`; None: stage 2 with the optimizer on the host.
        args: ``transformers.TrainingArguments``.
        world_size: number of ranks.

    Attributes:
        config: for the engine; without a scheduler, which the Trainer steps.
        notes: remarks about the file, for its author.

    Raises:
        ConfigError: everything in the configuration that is wrong or contradicts the arguments, at once.
    """

    def __init__(self, config: str | os.PathLike[str] | Mapping[str, Any] | Config | None, args: Any, world_size: int):
        self._args = args
        self._world_size = world_size
        self._file: dict[str, Any] = {}
        self._schedule: SchedulerConfig | None = None
        self.notes: tuple[str, ...] = ()
        self._source, content = read_config(_DEFAULT if config is None else config)
        if isinstance(content, Config):
            self._schedule = content.scheduler
            self.config = _agreed_config(content, args, world_size)
            return
        self._file = copy.deepcopy(dict(content))
        loaded = self._load(None)
        self.notes = loaded.notes
        self.config = loaded.config.model_copy(update={"scheduler": None})

    def scheduler(self, training_steps: int) -> SchedulerConfig | None:
        """Return the configuration's schedule for ``training_steps`` optimizer steps; None: the arguments' own."""
        return self._load(training_steps).config.scheduler if self._file.get("scheduler") else self._schedule

    def _load(self, training_steps: int | None) -> Any:
        """Load the file; with ``training_steps`` None (not known yet), without a schedule that depends on them."""
        data = copy.deepcopy(self._file)
        schedule = data.get("scheduler")
        params = schedule.get("params") if isinstance(schedule, Mapping) else None
        if training_steps is None and isinstance(params, Mapping) and "auto" in params.values():
            del data["scheduler"]
        statements = [
            *_batch(self._args, self._world_size),
            *_optimizer(self._args, data.get("optimizer")),
            *_schedule(self._args, training_steps),
            *_precision(self._args, data),
        ]
        problems = settle(data, statements)
        if problems:
            raise ConfigError(self._source, problems)
        auto = _autocast_dtype(self._args)
        return load_config(data, auto=auto, world_size=self._world_size, source=self._source)


def _says(path: str, value: Any, argument: str, fills: bool) -> ArgumentValue:
    """Return a statement of the arguments; ``argument`` is the argument's name."""
    advice = 'make them the same, or leave it to the arguments: write "auto"'
    return ArgumentValue(path, value, f"TrainingArguments({argument}={value!r})", advice, fills)


def _batch(args: Any, world_size: int) -> Iterator[ArgumentValue]:
    micro, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    yield _says("train_micro_batch_size_per_gpu", micro, "per_device_train_batch_size", True)
    yield _says("gradient_accumulation_steps", steps, "gradient_accumulation_steps", True)
    whole = _says("train_batch_size", micro * steps * world_size, "", False)
    product = f"TrainingArguments(per_device_train_batch_size={micro}, gradient_accumulation_steps={steps})"
    yield whole._replace(argument=f"{product} x {world_size} rank(s) = {whole.value}")
    clip = 0 if math.isinf(args.max_grad_norm or 0) else args.max_grad_norm or 0  # infinity: only measured
    yield _says("gradient_clipping", clip, "max_grad_norm", True)


def _optimizer(args: Any, section: Any) -> Iterator[ArgumentValue]:
    if not isinstance(section, Mapping):
        return
    adam = str(section.get("type", "")).lower() in _ADAMS
    path = "optimizer.params"
    betas = [args.adam_beta1, args.adam_beta2]
    yield _says(f"{path}.lr", args.learning_rate, "learning_rate", True)
    yield _says(f"{path}.weight_decay", args.weight_decay, "weight_decay", True)
    yield _says(f"{path}.betas", betas, "[adam_beta1, adam_beta2]", adam)
    yield _says(f"{path}.eps", args.adam_epsilon, "adam_epsilon", adam)


def _schedule(args: Any, training_steps: int | None) -> Iterator[ArgumentValue]:
    path = "scheduler.params"
    yield _says(f"{path}.warmup_min_lr", 0, "first learning rate", False)
    yield _says(f"{path}.warmup_max_lr", args.learning_rate, "learning_rate", False)
    if training_steps is not None:
        warmup = max(1, args.get_warmup_steps(training_steps))
        yield _says(f"{path}.warmup_num_steps", warmup, "warmup_steps", False)
        yield _says(f"{path}.total_num_steps", training_steps, "steps of the training", False)


def _precision(args: Any, data: Mapping[str, Any]) -> Iterator[ArgumentValue]:
    """Yield statements about the dtype.

    ``bf16=True`` alone means autocast, as in the plain Trainer. ``"auto"`` in the file has the meaning of the file's
    format: parameters of that dtype with float32 masters.
    """
    wanted, says = _wanted_dtype(args)
    auto = {f"{name}.enabled": name == wanted for name in ("bf16", "fp16")}
    said = Reading(data, {**auto, "torch_autocast.enabled": wanted is not None, **_autocast_dtype(args)}).values
    if said.get("torch_autocast.enabled") and said.get("torch_autocast.dtype") == wanted:
        return
    by_autocast = wanted is not None and not said.get(f"{wanted}.enabled")
    for path, value in (*auto.items(), ("torch_autocast.enabled", by_autocast)):
        yield says._replace(path=path, value=value, fills=by_autocast and path == "torch_autocast.enabled")
    if by_autocast:
        yield says._replace(path="torch_autocast.dtype", value=wanted)


def _wanted_dtype(args: Any) -> tuple[str | None, ArgumentValue]:
    """Return the dtype below float32 that the arguments ask for, and a statement of it for a field of a Config."""
    wanted = "bf16" if args.bf16 else "fp16" if args.fp16 else None
    argument = f"TrainingArguments(bf16={args.bf16!r}, fp16={args.fp16!r})"
    return wanted, ArgumentValue("autocast", wanted, argument, "make them the same, or leave it to the arguments")


def _autocast_dtype(args: Any) -> dict[str, str]:
    """Return the meaning of ``"auto"`` as autocast's dtype; any dtype will do if autocast is off."""
    return {"torch_autocast.dtype": _wanted_dtype(args)[0] or "bf16"}


def _agreed_config(config: Config, args: Any, world_size: int) -> Config:
    """Return the Config with the arguments' values in the fields that it leaves open."""
    kind = config.optimizer.type if config.optimizer is not None else ""
    statements = [*_batch(args, world_size), *_optimizer(args, {"type": kind})]
    fields, problems = settle_config(config, [each._replace(advice="leave it out here") for each in statements])
    fields["gradient_clipping"] = fields.get("gradient_clipping", config.gradient_clipping) or None
    wanted, says = _wanted_dtype(args)
    has = config.autocast or (config.dtype if config.dtype != "fp32" else None)
    if has is None:
        fields["autocast"] = wanted
    elif config.autocast:
        problems += contradictions({"autocast": has}, [says])
    else:
        problems += contradictions({"dtype": has}, [says._replace(path="dtype")])
    if problems:
        raise ConfigError("longshore.Config", problems)
    given = {name: getattr(config, name) for name in config.model_fields_set}
    # Validate again, since fp16 comes with loss scaling.
    return Config(**{**given, **fields, "scheduler": None}).resolved(world_size)

"""One configuration from two: ``TrainingArguments`` and ours. What they contradict each other in is an error."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from longshore.engine.config import Config, ConfigError, Problem, SchedulerConfig, load_config
from longshore.engine.config.load import read_file

_ABSENT: Any = object()
_ADAMS = ("adam", "adamw", "fusedadam", "deepspeedcpuadam", "cpuadam")


class _Argument(NamedTuple):
    """A key of the file that says what an argument says too."""

    path: str
    value: Any
    """What the arguments say."""
    name: str
    """Of the argument."""
    fills: bool
    """Whether the argument also counts where the file has no such key; otherwise only for ``"auto"``."""


class Settings:
    """What the engine is to do, from both.

    Values that are ``"auto"`` in the file come from the arguments, and so do those of batch sizes, clipping, precision
    and the optimizer's hyperparameters that the file leaves out.

    Args:
        config: a path, a dictionary, or a :class:`longshore.Config`; None: stage 2 with the optimizer on the host.
        args: ``transformers.TrainingArguments``.
        world_size: ranks.

    Attributes:
        config: for the engine; it has no scheduler, which the Trainer drives.
        notes: what a reader of the file should know.

    Raises:
        ConfigError: everything that is wrong with the configuration, or contradicts the arguments, at once.
    """

    def __init__(self, config: str | os.PathLike[str] | Mapping[str, Any] | Config | None, args: Any, world_size: int):
        self._args = args
        self._world_size = world_size
        self.notes: tuple[str, ...] = ()
        if config is None:
            config = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
        self._file: dict[str, Any] | None = None
        self._schedule: SchedulerConfig | None = None
        if isinstance(config, Config):
            self._schedule = config.scheduler
            self.config = _filled_config(config, args, world_size)
            return
        if isinstance(config, Mapping):
            self._source, self._file = "config", copy.deepcopy(dict(config))
        elif isinstance(config, (str, os.PathLike)):
            self._source, self._file = str(config), read_file(Path(config))
        else:
            raise TypeError(f"config= takes a path, a dictionary or a longshore.Config, not {type(config).__name__}")
        loaded = self._load(None)
        self.notes = loaded.notes
        self.config = loaded.config.model_copy(update={"scheduler": None})

    def scheduler(self, training_steps: int) -> SchedulerConfig | None:
        """The schedule that the configuration names, for so many optimizer steps; None: the arguments' own."""
        if self._file is None:
            return self._schedule
        return self._load(training_steps).config.scheduler if self._file.get("scheduler") else None

    def _load(self, training_steps: int | None) -> Any:
        """``training_steps`` None: they are not known yet, and a schedule that waits for them is left out."""
        assert self._file is not None
        data, problems = copy.deepcopy(self._file), []
        if training_steps is None and "auto" in _parameters(data, "scheduler").values():
            del data["scheduler"]
        for argument in (
            *_batch_arguments(self._args, self._world_size),
            *_optimizer_arguments(self._args, data),
            *_schedule_arguments(self._args, training_steps),
        ):
            problems += _settle(data, argument)
        problems += _settle_precision(data, self._args)
        if problems:
            raise ConfigError(self._source, problems)
        try:
            return load_config(data, world_size=self._world_size)
        except ConfigError as error:
            raise ConfigError(self._source, error.problems) from None


# -- what the arguments say -------------------------------------------------------------------------------------------


def _batch_arguments(args: Any, world_size: int) -> Iterator[_Argument]:
    micro, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    whole = "per_device_train_batch_size x gradient_accumulation_steps x ranks"
    yield _Argument("train_micro_batch_size_per_gpu", micro, "per_device_train_batch_size", True)
    yield _Argument("gradient_accumulation_steps", steps, "gradient_accumulation_steps", True)
    yield _Argument("train_batch_size", micro * steps * world_size, whole, False)
    clip = 0 if math.isinf(args.max_grad_norm or 0) else args.max_grad_norm or 0  # infinity: only measured
    yield _Argument("gradient_clipping", clip, "max_grad_norm", True)


def _optimizer_arguments(args: Any, data: Mapping[str, Any]) -> Iterator[_Argument]:
    section = data.get("optimizer")
    if not isinstance(section, Mapping):
        return
    kind = str(section.get("type", "")).lower()
    path = "optimizer.params"
    yield _Argument(f"{path}.lr", args.learning_rate, "learning_rate", True)
    yield _Argument(f"{path}.weight_decay", args.weight_decay, "weight_decay", True)
    adam = kind in _ADAMS
    yield _Argument(f"{path}.betas", [args.adam_beta1, args.adam_beta2], "adam_beta1 and adam_beta2", adam)
    yield _Argument(f"{path}.eps", args.adam_epsilon, "adam_epsilon", adam)


def _schedule_arguments(args: Any, training_steps: int | None) -> Iterator[_Argument]:
    path = "scheduler.params"
    yield _Argument(f"{path}.warmup_min_lr", 0, "a first learning rate of 0", False)
    yield _Argument(f"{path}.warmup_max_lr", args.learning_rate, "learning_rate", False)
    if training_steps is not None:
        yield _Argument(
            f"{path}.warmup_num_steps", max(1, args.get_warmup_steps(training_steps)), "warmup_steps", False
        )
        yield _Argument(f"{path}.total_num_steps", training_steps, "as many steps as the Trainer will make", False)


# -- settling ---------------------------------------------------------------------------------------------------------


def _parameters(data: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    found = data.get(section)
    params = found.get("params") if isinstance(found, Mapping) else None
    return params if isinstance(params, Mapping) else {}


def _settle(data: dict[str, Any], argument: _Argument) -> list[Problem]:
    """Write the argument into the file where that leaves it open."""
    *sections, name = argument.path.split(".")
    holder: Any = data
    for section in sections:
        if not argument.fills and section not in holder:
            return []
        holder = holder.setdefault(section, {})
        if not isinstance(holder, dict):
            return []  # the loader says what is wrong with it
    found = holder.get(name, _ABSENT)
    if found is None:
        found = _ABSENT
    if found == "auto" or (found is _ABSENT and argument.fills):
        holder[name] = argument.value
        return []
    if found is _ABSENT or _same(found, argument.value):
        return []
    return [_contradiction(argument, found)]


def _contradiction(argument: _Argument, found: Any, leave: str = 'write "auto"') -> Problem:
    what = (
        f"and TrainingArguments have {argument.value!r} ({argument.name}); make them the same, or leave it to the "
        f"arguments: {leave}"
    )
    return Problem(argument.path, what, found)


def _same(found: Any, value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return isinstance(found, (list, tuple)) and list(found) == list(value)
    # A number of another type is for the loader to refuse.
    return found == value or isinstance(found, (str, bool, list, dict))


def _wanted_dtype(args: Any) -> str | None:
    return "bf16" if args.bf16 else "fp16" if args.fp16 else None


def _said_dtype(name: Any) -> str | None:
    """A dtype as files write it."""
    known = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "half": "fp16"}
    return known.get(str(name).lower().removeprefix("torch."))


def _settle_precision(data: dict[str, Any], args: Any) -> list[Problem]:
    """``bf16=True`` alone means autocast, as in the plain Trainer; ``"auto"`` in the file means what it does there:
    parameters of that dtype with float32 masters."""
    wanted, on = _wanted_dtype(args), []
    for section in ("bf16", "fp16", "torch_autocast"):
        holder = data.get(section)
        if not isinstance(holder, dict):
            continue
        if holder.get("dtype") == "auto":
            if wanted is None:
                del holder["dtype"]
            else:
                holder["dtype"] = wanted
        enabled = holder.get("enabled", _ABSENT)
        if enabled == "auto":
            enabled = holder["enabled"] = wanted is not None if section == "torch_autocast" else wanted == section
        if enabled is True:
            on.append((section, section if section != "torch_autocast" else _said_dtype(holder.get("dtype"))))
        elif enabled is False and section == wanted:
            on.append((section, None))
    if not on:
        if wanted is not None:
            data["torch_autocast"] = {"enabled": True, "dtype": {"bf16": "bfloat16", "fp16": "float16"}[wanted]}
        return []
    if any(dtype == wanted for _, dtype in on):
        return []
    return [
        Problem(
            f"{section}.enabled",
            f"and TrainingArguments have bf16={args.bf16!r}, fp16={args.fp16!r}; make them the same, or write "
            f'"auto" for {section}.enabled',
            dtype is not None,
        )
        for section, dtype in on
    ]


# -- a Config of ours -------------------------------------------------------------------------------------------------


def _filled_config(config: Config, args: Any, world_size: int) -> Config:
    """With the arguments' values in the fields that it leaves at None."""
    fields = {
        "train_micro_batch_size_per_gpu": "micro_batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "train_batch_size": "train_batch_size",
        "gradient_clipping": "gradient_clipping",
    }
    problems, updates = [], {}
    for argument in _batch_arguments(args, world_size):
        field = fields[argument.path]
        found = getattr(config, field)
        if found is None:
            updates[field] = argument.value or None
        elif found != argument.value:
            problems.append(_contradiction(argument._replace(path=field), found, "leave it out"))
    optimizer = config.optimizer
    if optimizer is not None:
        section = {"optimizer": {"type": optimizer.type, "params": {}}}
        said: dict[str, Any] = {}
        for argument in _optimizer_arguments(args, section):
            name = argument.path.rpartition(".")[2]
            if name not in type(optimizer).model_fields:
                continue
            if name not in optimizer.model_fields_set:
                said[name] = argument.value
            elif not _same(getattr(optimizer, name), argument.value):
                problems.append(_contradiction(argument, getattr(optimizer, name), "leave it out"))
        updates["optimizer"] = type(optimizer)(
            **{name: getattr(optimizer, name) for name in optimizer.model_fields_set}, **said
        )
    wanted = _wanted_dtype(args)
    has = config.autocast or (config.dtype if config.dtype != "fp32" else None)
    if has is None and wanted is not None:
        updates["autocast"] = wanted
    elif has != wanted:
        what = f"and TrainingArguments have bf16={args.bf16!r}, fp16={args.fp16!r}; make them the same"
        problems.append(Problem("autocast" if config.autocast else "dtype", what, has))
    if problems:
        raise ConfigError("longshore.Config", problems)
    # Validated anew: fp16 brings its loss scale.
    given = {name: getattr(config, name) for name in config.model_fields_set}
    return Config(**{**given, **updates, "scheduler": None}).resolved(world_size)

"""``load_config``: a DeepSpeed file or a dict, translated into a ``Config``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from longshore import Config, ConfigError
from longshore.compat.config.reading import Reading, read_file
from longshore.compat.config.table import TARGETS
from longshore.engine.config import FlopsProfilerConfig, LossScaling
from longshore.seam import (
    MONITORS,
    NO_OPTIMIZER,
    OPTIMIZER_CONFIGS,
    OPTIMIZERS,
    OURS,
    SCHEDULER_CONFIGS,
    BatchNumbers,
    FrozenModel,
    NamedModel,
    Names,
    StateFormat,
    check_encodable,
    check_states_seed,
    check_world_size,
    checked_config,
    resolve,
)

DEEPSPEED = Names("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

_DEEPSPEED_CLIPPING = 1.0
"""DeepSpeed 0.19's default of ``gradient_clipping``."""

_TORCH_SCALER = LossScaling(window=2000, hysteresis=1)
"""The defaults of ``torch.amp.GradScaler``, which DeepSpeed uses under fp16 autocast."""

_MUON_RATES = {"muon_lr": 0.02, "adam_lr": 3e-4}
"""Learning rates of DeepSpeed's Muon where a file gives none."""

_OFFLOAD = "zero_optimization.offload_optimizer"

_STATES, _SEED = f"{_OFFLOAD}.states", f"{_OFFLOAD}.states_seed"
_BF16_STATES, _FP32_STATES = "bf16.bf16_optimizer_states", "optimizer.params.fp32_optimizer_states"
_ENCODED = tuple(each.value for each in StateFormat if each is not StateFormat.FP32)
_FORMATS = {(_BF16_STATES, True): ("bf16",), (_FP32_STATES, False): _ENCODED, (_FP32_STATES, True): ("fp32",)}
"""The formats of states with which DeepSpeed's keys agree, by key and value."""


class LoadedConfig(NamedTuple):
    """A configuration, and ``notes`` about it that are worth showing once, on one rank."""

    config: Config
    notes: tuple[str, ...]


def load_config(
    config: str | os.PathLike[str] | Mapping[str, Any] | Config,
    *,
    auto: Mapping[str, Any] | None = None,
    world_size: int | None = None,
    needs_optimizer: bool = False,
    source: str | None = None,
) -> LoadedConfig:
    """Read a DeepSpeed file, or a dict with the same content, into a ``Config``.

    Args:
        config: path of a JSON file, a dict, or a ``Config``, which is taken as it is.
        auto: values for keys that are ``"auto"``, by dotted path (``{"optimizer.params.lr": 1e-4}``). Values for other
            keys are ignored.
        world_size: the number of ranks. When given, the batch numbers of the result are all set; otherwise see
            :meth:`Config.resolved`.
        needs_optimizer: whether the configuration has to name an optimizer, since none is passed.
        source: name of the configuration in errors; by default that of :func:`read_config`.

    Raises:
        ConfigError: a ValueError that lists all problems, each with its path, its value and the remedy.
        TypeError: ``config`` has another type.
        ValueError: ``world_size`` is not a number of ranks.
    """
    if world_size is not None:
        check_world_size(world_size)
    name, content = read_config(config)
    if isinstance(content, Config):
        return LoadedConfig(checked_config(content, world_size, needs_optimizer), ())
    return _translate(content, source or name, auto or {}, world_size, needs_optimizer)


def read_config(
    config: str | os.PathLike[str] | Mapping[str, Any] | Config,
) -> tuple[str, Config | Mapping[str, Any]]:
    """Return the name of a configuration in errors, and its content: a ``Config``, or the file's."""
    if isinstance(config, Config):
        return "Config", config
    if isinstance(config, Mapping):
        return "config", config
    if isinstance(config, (str, os.PathLike)):
        return str(Path(config)), read_file(Path(config))
    raise TypeError(f"config is a path, a dict or a longshore.Config, not {type(config).__name__}")


def _translate(
    data: Mapping[Any, Any], source: str, auto: Mapping[str, Any], world_size: int | None, needs_optimizer: bool
) -> LoadedConfig:
    reading = Reading(data, auto)
    fields = {
        field: reading.values[path]
        for field, path in TARGETS.items()
        if path in reading.values and field in Config.model_fields
    }
    fields |= _batch_fields(reading, world_size)
    if fields.get("steps_per_print") == math.inf:
        fields["steps_per_print"] = None
    readers = (_precision_fields, _clipping_fields, _offload_fields, _states_fields, _param_fields, _wrap_fields)
    for read in (*readers, _monitor_fields, _profiler_fields, _named_fields):
        fields |= read(reading)
    if needs_optimizer and "optimizer" not in fields and not reading.has_problem("optimizer"):
        reading.problems.append(NO_OPTIMIZER)
    config = _made(Config, fields, reading, lambda name: TARGETS.get(name, "(together)"))
    if reading.problems or config is None:
        raise ConfigError(source, reading.problems)
    return LoadedConfig(config, tuple(reading.notes))


def _made(model: type[FrozenModel], fields: Mapping[str, Any], reading: Reading, path_of: Callable[[str], str]) -> Any:
    """Return the model with these fields; None if they have problems, which are reported with paths of the file."""
    try:
        return model(**fields)
    except ConfigError as error:
        for problem in error.problems:
            reading.problem(path_of(problem.path), problem.what, problem.value)
    return None


def _batch_fields(reading: Reading, world_size: int | None) -> dict[str, int]:
    """Return the batch numbers, all three if the number of ranks is known."""
    if any(reading.has_problem(name) for name in DEEPSPEED):
        return {}
    given = BatchNumbers(*map(reading.values.get, DEEPSPEED))
    if given.train is None and given.micro is None:
        is_auto = "auto" in (reading.data.get(DEEPSPEED.train), reading.data.get(DEEPSPEED.micro))
        state = '"auto", and not filled in' if is_auto else "missing"
        reading.problem(DEEPSPEED.train, f"is {state}, and so is {DEEPSPEED.micro}; set one of them")
        return {}
    try:
        numbers = resolve(given, world_size, DEEPSPEED)
    except ValueError as error:
        reading.problem(DEEPSPEED.train, str(error), given.train)
        return {}
    return {name: number for name, number in zip(OURS, numbers, strict=True) if number is not None}


def _precision_fields(reading: Reading) -> dict[str, Any]:
    """Read ``fp16``, ``bf16`` and ``torch_autocast``, of which at most one is enabled."""
    readers = {"fp16": _fp16, "bf16": _bf16, "torch_autocast": _autocast}
    enabled = [section for section in readers if reading.values.get(f"{section}.enabled")]
    if len(enabled) > 1:
        others = " and ".join(f"{section}.enabled" for section in enabled[1:])
        what = f"excludes {others}, which {'is' if len(enabled) == 2 else 'are'} true too; leave one of them true"
        reading.problem(f"{enabled[0]}.enabled", what, True)
        return {}
    dtype = next((section for section in enabled if section != "torch_autocast"), "fp32")
    wanted = reading.values.get("data_types.param_dtype", dtype)
    if wanted != dtype:
        what = f"must agree with fp16 and bf16, by which parameters are {dtype}; change one, or leave it out"
        reading.problem("data_types.param_dtype", what, wanted)
    return readers[enabled[0]](reading) if enabled else {}


def _fp16(reading: Reading) -> dict[str, Any]:
    values = reading.values
    paths = {name: TARGETS.get(f"loss_scaling.{name}", "") for name in LossScaling.model_fields}
    scale = values.get("fp16.loss_scale")
    given = {"scale": scale} if scale else {name: values[path] for name, path in paths.items() if path in values}
    scaling = _made(LossScaling, given, reading, lambda name: paths.get(name) or "fp16")
    return {"dtype": "fp16", "cast_inputs": values.get("fp16.auto_cast", False), "loss_scaling": scaling}


def _bf16(reading: Reading) -> dict[str, Any]:
    check = reading.values.get("bf16.check_grad_overflow")
    if check:
        # A scale of 1 changes no number, and with a scale, a step whose gradients are not finite is skipped.
        return {"dtype": "bf16", "loss_scaling": LossScaling(scale=1.0)}
    if check is None:
        reading.notes.append(
            "bf16.check_grad_overflow is not given: NaN and infinity are applied as torch applies them, where "
            "DeepSpeed would skip the step; set it to true to skip, or to false to say that this is meant"
        )
    return {"dtype": "bf16"}


def _autocast(reading: Reading) -> dict[str, Any]:
    dtype = reading.values.get("torch_autocast.dtype")
    if dtype is None:
        if not reading.has_problem("torch_autocast.dtype"):
            what = "is missing, and torch's own default depends on the device; set it to bfloat16 or float16"
            reading.problem("torch_autocast.dtype", what)
        return {}
    return {"autocast": dtype, "loss_scaling": _TORCH_SCALER if dtype == "fp16" else None}


def _clipping_fields(reading: Reading) -> dict[str, Any]:
    """Read ``gradient_clipping``: 0 is no clipping. A file without it means DeepSpeed's default, with a note."""
    norm = reading.values.get("gradient_clipping")
    if norm is None:
        norm = _DEEPSPEED_CLIPPING
        reading.notes.append(
            f"gradient_clipping is not given, which means {norm:g} in a DeepSpeed file: gradients are clipped to that "
            "norm; set it to 0 for no clipping"
        )
    return {"gradient_clipping": norm or None}


def _monitor_fields(reading: Reading) -> dict[str, Any]:
    """Read ``tensorboard``, ``wandb`` and ``csv_monitor`` if they are enabled. Empty texts count as left out."""
    fields: dict[str, Any] = {}
    for section, model in MONITORS.items():
        if reading.values.get(f"{section}.enabled"):
            given = {name: reading.values.get(f"{section}.{name}") for name in model.model_fields}
            fields[section] = model(**{name: value for name, value in given.items() if value})
    return fields


def _profiler_fields(reading: Reading) -> dict[str, Any]:
    """Read ``flops_profiler`` if it is enabled. An empty ``output_file`` counts as left out."""
    start = "flops_profiler."
    if not reading.values.get(f"{start}enabled"):
        return {}
    given = {name: reading.values.get(f"{start}{name}") for name in FlopsProfilerConfig.model_fields}
    return {"flops_profiler": FlopsProfilerConfig(**{k: v for k, v in given.items() if v not in (None, "")})}


def _wrap_fields(reading: Reading) -> dict[str, Any]:
    """Read ``wrap_policy``, which chooses the modules that stage 3 gathers."""
    policy = reading.values.get("longshore.wrap_policy", "auto")
    stage = reading.values.get("zero_optimization.stage", 0)
    if policy == "auto" or stage == 3:
        return {}
    if not reading.has_problem("zero_optimization.stage"):
        what = f"must agree with zero_optimization.stage, which is {stage}: it is for stage 3; leave it out"
        reading.problem("longshore.wrap_policy", what, policy)
    return {"wrap_policy": "auto"}


def _offload_fields(reading: Reading) -> dict[str, Any]:
    """Read ``super_offload`` with the keys that it affects, and ``ratio``. Both need optimizer state on the host."""
    values = reading.values
    memory, super_offload, ratio = "longshore.speculation_memory", f"{_OFFLOAD}.super_offload", f"{_OFFLOAD}.ratio"
    asked = [path for path, none in ((memory, 0), (super_offload, False), (ratio, 1)) if values.get(path, none) != none]
    device = values.get(f"{_OFFLOAD}.device", "none")
    if asked and device != "cpu":
        if not reading.has_problem(f"{_OFFLOAD}.device"):
            what = (
                f"must agree with {_OFFLOAD}.device, which is {device}: it is about optimizer state on the host; set "
                "that to cpu, or leave this out"
            )
            for path in asked:
                reading.problem(path, what, values[path])
        return {"speculation_memory": 0, "offload_ratio": 1.0}
    fields: dict[str, Any] = {}
    if super_offload in asked:
        fields["speculation_memory"] = values.get(memory, "auto")
        cores = f"{_OFFLOAD}.cpuadam_cores_perc"
        others = [path for path in ("longshore.threads", "longshore.cpu_set") if path in values]
        if cores in values and others:
            what = f"excludes {' and '.join(others)}, which chooses host threads too; leave one of them out"
            reading.problem(cores, what, values[cores])
        elif cores in values:
            fields["cpu_share"] = values[cores]
    in_step = values.get("zero_optimization.stage", 0) < 2 and not values.get("zero_optimization.overlap_comm", True)
    if in_step and fields.get("speculation_memory", values.get(memory)):
        reading.notes.append(
            "zero_optimization.overlap_comm is false: with several ranks, stages 0 and 1 then reduce gradients in "
            "step(), and nothing is stepped during backward; leave it out"
        )
    return fields


def _states_fields(reading: Reading) -> dict[str, Any]:
    """Read the format of the optimizer's states, which DeepSpeed's own keys may give too."""
    values = reading.values
    unencoded = {"states": "fp32", "states_seed": 0}
    if reading.has_problem(_STATES):
        return unencoded
    asking = [path for path, asks in ((_BF16_STATES, True), (_FP32_STATES, False)) if values.get(path) is asks]
    by = _STATES if _STATES in values else next(iter(asking), "")
    states = values.get(_STATES, "bf16" if asking else "fp32")
    for (path, value), formats in _FORMATS.items():
        if by and values.get(path) is value and states not in formats:
            what = f"must agree with {by}, by which states are {states}; change one, or leave one out"
            reading.problem(path, what, value)
            return unencoded
    try:
        check_states_seed(states, values.get(_SEED, 0))
    except ValueError as error:
        reading.problem(_SEED, str(error), values[_SEED])
        return unencoded
    if states != "fp32" and (kind := values.get("optimizer.type")) is not None:
        try:
            check_encodable(kind, states)
        except ValueError as error:
            reading.problem(by, str(error), values[by])
            return unencoded
    if by in asking:
        masters = "gives them the dtype of the masters, and if that is bf16, " if by == _FP32_STATES else ""
        reading.notes.append(
            f"{by} is read as {_STATES} bf16, which is rounded stochastically; DeepSpeed {masters}rounds to nearest, "
            "by which a second moment with beta2 0.999 never decays: a step changes it by less than half a unit in "
            "the last place"
        )
    return {"states": states}


def _param_fields(reading: Reading) -> dict[str, Any]:
    """Read ``offload_param``, whose parameters are stepped on the host, where they are, and are cast by no autocast."""
    path, states_on = "zero_optimization.offload_param.device", f"{_OFFLOAD}.device"
    if reading.values.get(path, "none") == "none":
        return {}
    needed = {
        "zero_optimization.stage": (3, 0),
        f"{_OFFLOAD}.ratio": (1, 1),
        "torch_autocast.enabled": (False, False),
    }
    for name, (wanted, default) in needed.items():
        found = reading.values.get(name, default)
        if found != wanted and not reading.has_problem(name):
            what = f"must agree with {name}, which is {found}: parameters in host memory need {wanted}; change one"
            reading.problem(path, what, "cpu")
            return {"param_device": "none"}
    if any(map(reading.has_problem, (*needed, states_on))):
        return {"param_device": "none"}
    if reading.values.get(states_on, "none") == "none":
        reading.notes.append(
            f"{path} is cpu, and {states_on} is none: the optimizer's state is on the host, too, and is stepped there, "
            "since the parameters are there (the weights are the same bits); set it to cpu to say that this is meant"
        )
    return {"offload_device": "cpu"}


def _named_fields(reading: Reading) -> dict[str, Any]:
    """Read ``optimizer`` and ``scheduler``."""
    fields: dict[str, Any] = {}
    for section in ("optimizer", "scheduler"):
        start = f"{section}.params"
        kind = reading.values.get(f"{section}.type")
        # Parameters with reported problems are left out of the values, and the model would report them as missing.
        if kind is None or reading.has_problem(start):
            continue
        given = {
            path.removeprefix(f"{start}."): value for path, value in reading.values.items() if path.startswith(start)
        }
        model = SCHEDULER_CONFIGS[kind] if section == "scheduler" else _optimizer(kind, given, reading)
        made = _made(model, given, reading, lambda name, at=start: at if name.startswith("(") else f"{at}.{name}")
        if made is not None:
            fields[section] = made
    return fields


def _optimizer(kind: str, given: dict[str, Any], reading: Reading) -> type[NamedModel]:
    """Return the model of an optimizer, and change ``given``, a file's parameters, into its fields."""
    given.pop("fp32_optimizer_states", None)  # see _states_fields
    defaults = {} if given.pop("torch_adam", False) else dict(OPTIMIZERS[kind].file_defaults)
    if kind == "Muon":
        if "lr" not in given:
            defaults = {**_MUON_RATES, **defaults}
        if given.pop("ns_method", None) is None:
            reading.notes.append(
                "optimizer.type Muon gives the weights of torch.optim.Muon and torch.optim.AdamW, with clipping before "
                "momentum; DeepSpeed's default is Gram Newton-Schulz in float16, whose numbers are others; set "
                "ns_method to standard to say that this is meant"
            )
    decoupled = given.pop("adam_w_mode", True)
    if kind == "Muon" and not decoupled:
        what = "is not supported: what Muon does not step, AdamW steps; leave it out"
        reading.problem("optimizer.params.adam_w_mode", what, decoupled)
    if decoupled and kind == "Adam":
        kind = "AdamW"
        if given.get("weight_decay"):
            reading.notes.append(
                "optimizer.type Adam means AdamW in a DeepSpeed file: weight decay is decoupled; set adam_w_mode to "
                "false for Adam's, or the type to AdamW to say that this is meant"
            )
    given |= defaults | given
    return OPTIMIZER_CONFIGS[kind]

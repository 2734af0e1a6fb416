"""Fields of ``Config`` that take more than copying a value: precision, clipping, offload, optimizer and schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longshore.engine.config.base import ConfigError, FrozenModel, NamedModel
from longshore.engine.config.model import CsvConfig, LossScaling, TensorBoardConfig, WandbConfig
from longshore.engine.config.optimizers import DEEPSPEED_DEFAULTS, OPTIMIZERS
from longshore.engine.config.reading import Reading
from longshore.engine.config.schedulers import SCHEDULERS

DEEPSPEED_CLIPPING = 1.0
"""DeepSpeed 0.19's default of ``gradient_clipping``."""

_TORCH_SCALER = LossScaling(window=2000, hysteresis=1)
"""As ``torch.amp.GradScaler``, which DeepSpeed uses under fp16 autocast."""

_SCALING = {
    "initial_scale_power": "fp16.initial_scale_power",
    "window": "fp16.loss_scale_window",
    "hysteresis": "fp16.hysteresis",
    "consecutive_hysteresis": "fp16.consecutive_hysteresis",
    "min_scale": "fp16.min_loss_scale",
}


def precision_fields(reading: Reading) -> dict[str, Any]:
    """``fp16``, ``bf16`` and ``torch_autocast``, of which at most one is enabled."""
    values = reading.values
    sections = ("fp16", "bf16", "torch_autocast")
    enabled = [section for section in sections if values.get(f"{section}.enabled")]
    if len(enabled) > 1:
        others = " and ".join(f"{section}.enabled" for section in enabled[1:])
        what = f"excludes {others}, which {'is' if len(enabled) == 2 else 'are'} true too; leave one of them true"
        reading.problem(f"{enabled[0]}.enabled", what, True)
        return {}
    mode = enabled[0] if enabled else ""
    wanted, dtype = values.get("data_types.param_dtype"), mode if mode in ("fp16", "bf16") else "fp32"
    if wanted not in (None, dtype):
        what = f"must agree with fp16 and bf16, by which parameters are {dtype}; change one, or leave it out"
        reading.problem("data_types.param_dtype", what, wanted)
    return {"fp16": _fp16, "bf16": _bf16, "torch_autocast": _autocast, "": lambda _: {}}[mode](reading)


def _fp16(reading: Reading) -> dict[str, Any]:
    values = reading.values
    fields: dict[str, Any] = {"dtype": "fp16", "cast_inputs": values.get("fp16.auto_cast", False)}
    if values.get("fp16.loss_scale"):
        fields["loss_scaling"] = LossScaling(scale=values["fp16.loss_scale"])
        return fields
    given = {name: values[path] for name, path in _SCALING.items() if path in values}
    try:
        fields["loss_scaling"] = LossScaling(**given)
    except ConfigError as error:
        for problem in error.problems:
            reading.problem(_SCALING.get(problem.path, "fp16"), problem.what, problem.value)
    return fields


def _bf16(reading: Reading) -> dict[str, Any]:
    check = reading.values.get("bf16.check_grad_overflow")
    if check:
        # A scale of 1 changes no number, and with a scaler a step that is not finite is skipped.
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


def clipping_fields(reading: Reading, data: Mapping[Any, Any]) -> dict[str, Any]:
    """``gradient_clipping``; 0 is none, and absent is DeepSpeed's default, with a note."""
    norm = reading.values.get("gradient_clipping")
    if norm is None:
        if "gradient_clipping" not in data:
            reading.notes.append(
                f"gradient_clipping is not given, which means {DEEPSPEED_CLIPPING:g} in a DeepSpeed file: gradients "
                "are clipped to that norm; set it to 0 for no clipping"
            )
        return {"gradient_clipping": DEEPSPEED_CLIPPING}
    return {"gradient_clipping": norm or None}


_MONITORS: dict[str, type[FrozenModel]] = {
    "tensorboard": TensorBoardConfig,
    "wandb": WandbConfig,
    "csv_monitor": CsvConfig,
}


def monitor_fields(reading: Reading) -> dict[str, Any]:
    """``tensorboard``, ``wandb`` and ``csv_monitor``, where they are enabled. An empty text is none."""
    fields: dict[str, Any] = {}
    for section, kind in _MONITORS.items():
        if reading.values.get(f"{section}.enabled"):
            given = {name: reading.values.get(f"{section}.{name}") for name in kind.model_fields}
            fields[section] = kind(**{name: value for name, value in given.items() if value})
    return fields


def wrap_fields(reading: Reading) -> dict[str, Any]:
    """``wrap_policy``, which says what stage 3 gathers."""
    policy = reading.values.get("longshore.wrap_policy", "auto")
    stage = reading.values.get("zero_optimization.stage", 0)
    if policy == "auto" or stage == 3:
        return {}
    if not reading.has_problem("zero_optimization.stage"):
        what = f"must agree with zero_optimization.stage, which is {stage}: it is for stage 3; leave it out"
        reading.problem("longshore.wrap_policy", what, policy)
    return {"wrap_policy": "auto"}


_OFFLOAD = "zero_optimization.offload_optimizer"


def offload_fields(reading: Reading) -> dict[str, Any]:
    """``super_offload`` and what it means here, and ``ratio``; all of it needs the optimizer's state on the host."""
    values = reading.values
    super_offload = values.get(f"{_OFFLOAD}.super_offload", False)
    asked = {
        "longshore.speculation_memory": values.get("longshore.speculation_memory", 0),
        f"{_OFFLOAD}.super_offload": super_offload,
        f"{_OFFLOAD}.ratio": values.get(f"{_OFFLOAD}.ratio", 1.0) != 1.0,
    }
    device = values.get(f"{_OFFLOAD}.device", "none")
    if any(asked.values()) and device != "cpu":
        said = reading.has_problem(f"{_OFFLOAD}.device")
        for path in (path for path, wanted in asked.items() if wanted and not said):
            what = (
                f"must agree with {_OFFLOAD}.device, which is {device}: it is about optimizer state on the host; set "
                "that to cpu, or leave this out"
            )
            reading.problem(path, what, values[path])
        return {"speculation_memory": 0, "offload_ratio": 1.0}
    fields = {"speculation_memory": values.get("longshore.speculation_memory", "auto")} if super_offload else {}
    cores = f"{_OFFLOAD}.cpuadam_cores_perc"
    if super_offload and cores in values:
        others = [path for path in ("longshore.threads", "longshore.cpu_set") if path in values]
        if others:
            what = f"excludes {' and '.join(others)}, which chooses host threads too; leave one of them out"
            reading.problem(cores, what, values[cores])
        else:
            fields["cpu_share"] = values[cores]
    memory = fields.get("speculation_memory", asked["longshore.speculation_memory"])
    if (
        memory
        and values.get("zero_optimization.stage", 0) < 2
        and not values.get("zero_optimization.overlap_comm", True)
    ):
        reading.notes.append(
            "zero_optimization.overlap_comm is false: with several ranks, stages 0 and 1 then reduce gradients in "
            "step(), and nothing is stepped during backward; leave it out"
        )
    return fields


def named_fields(reading: Reading) -> dict[str, Any]:
    """``optimizer`` and ``scheduler``."""
    fields: dict[str, Any] = {}
    for section in ("optimizer", "scheduler"):
        kind = reading.values.get(f"{section}.type")
        # What is wrong with a parameter is said already; without it others would seem to be missing.
        if kind is None or reading.has_problem(f"{section}.params"):
            continue
        start = f"{section}.params."
        params = {path.removeprefix(start): value for path, value in reading.values.items() if path.startswith(start)}
        try:
            fields[section] = (
                _optimizer(kind, params, reading) if section == "optimizer" else SCHEDULERS[kind](**params)
            )
        except ConfigError as error:
            for problem in error.problems:
                path = f"{section}.params" + ("" if problem.path.startswith("(") else f".{problem.path}")
                reading.problem(path, problem.what, problem.value)
    return fields


def _optimizer(kind: str, params: dict[str, Any], reading: Reading) -> NamedModel:
    defaults = {} if params.pop("torch_adam", False) else DEEPSPEED_DEFAULTS[kind]
    if params.pop("adam_w_mode", True) and kind == "Adam":
        kind = "AdamW"
        if params.get("weight_decay"):
            reading.notes.append(
                "optimizer.type Adam means AdamW in a DeepSpeed file: weight decay is decoupled; set adam_w_mode to "
                "false for Adam's, or the type to AdamW to say that this is meant"
            )
    return OPTIMIZERS[kind](**{**defaults, **params})

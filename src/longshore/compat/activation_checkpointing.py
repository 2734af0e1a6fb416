"""``configure`` of ``longshore.checkpointing``: the section ``activation_checkpointing`` of DeepSpeed's files."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longshore.compat.config.reading import read_file
from longshore.compat.config.table import KEYS
from longshore.seam import WrongValueError, did_you_mean, install, shown

_SECTION = "activation_checkpointing"
_KEYS = {name: key for (section, name), key in KEYS.items() if section == _SECTION}


def configure(
    mpu_: Any = None,
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Configure :func:`checkpoint`, with the arguments of ``deepspeed.checkpointing.configure``.

    Args:
        mpu_: a model-parallel unit; accepted when it has one model-parallel rank.
        deepspeed_config: a path or a dict, whose section ``activation_checkpointing`` is read.
        partition_activations: overrides the key of this name. Like ``contiguous_checkpointing``, ``num_checkpoints``,
            ``synchronize`` and ``profile`` it is checked and has no effect (``docs/deepspeed_config.md`` says why).
        contiguous_checkpointing: overrides ``contiguous_memory_optimization``.
        num_checkpoints: overrides ``number_checkpoints``.
        checkpoint_in_cpu: overrides ``cpu_checkpointing``.
        synchronize: overrides ``synchronize_checkpoint_boundary``.
        profile: overrides the key of this name.

    Raises:
        ValueError: the section or the arguments are wrong (the message lists all problems), the file cannot be read or
            is not a JSON object, or there are several model-parallel ranks.
    """
    _check_model_parallel(mpu_)
    config = {} if deepspeed_config is None else deepspeed_config
    config = config if isinstance(config, Mapping) else read_file(Path(config))
    section = config.get(_SECTION, {})
    if not isinstance(section, Mapping):
        raise ValueError(f"{_SECTION} must be a section, an object in braces, and is {shown(section)}")
    arguments = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    settings = {**section, **{name: value for name, value in arguments.items() if value is not None}}
    problems = ""
    for name, value in [*settings.items()]:
        try:
            if name not in _KEYS:
                raise WrongValueError(f"is not known; {did_you_mean(name, _KEYS)}")
            if value is not None and (read := _KEYS[name].kind.converted(value)) is not None:
                settings[name] = read
                warnings.warn(f"{_SECTION}.{name} = {shown(value)} is read as {read}; write it so", stacklevel=2)
            elif value is not None:
                _KEYS[name].kind.check(value)
        except WrongValueError as error:
            problems += f"\n  {_SECTION}.{name} = {shown(value)}: {error}"
    if problems:
        raise ValueError(f"activation checkpointing cannot be configured:{problems}")
    install(bool(settings.get("cpu_checkpointing")))


def _check_model_parallel(mpu: Any) -> None:
    names = ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size")
    name = next((name for name in names if getattr(mpu, name, None) is not None), None)
    if name is None and mpu is not None:
        raise ValueError(
            f"mpu_ must have get_model_parallel_world_size(), and {type(mpu).__name__} does not: use mpu_=None"
        )
    if name is not None and (size := getattr(mpu, name)()) != 1:
        raise ValueError(
            f"activation checkpointing does not keep the random states of model-parallel ranks, and mpu_.{name}() is "
            f"{size}: use one model-parallel rank, and mpu_=None"
        )

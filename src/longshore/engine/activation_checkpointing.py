"""Activation checkpointing on ``torch.utils.checkpoint``, with the calls of ``deepspeed.checkpointing``.

Everything that a checkpointed function computes is dropped after forward and computed again in backward; only its
inputs are kept, on their device or, with ``cpu_checkpointing``, in host memory. Gradients have the same bits either
way, since the recomputation uses the random state of the first run. An input comes back from the host with its values,
strides and alignment, so that the recomputation runs the same kernels on it and gives the same bits.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from longshore.activations import compute_again, held_host_bytes
from longshore.engine.config.load import read_file
from longshore.engine.config.table import KEYS
from longshore.engine.config.values import WrongValueError
from longshore.engine.wording import did_you_mean, shown

__all__ = ["checkpoint", "configure", "held_host_bytes", "install", "is_configured", "reset"]

_SECTION = "activation_checkpointing"
_KEYS = {name: key for (section, name), key in KEYS.items() if section == _SECTION}

# -- settings ----------------------------------------------------------------------

_on_host: bool | None = None
"""Whether inputs of checkpointed functions are kept in host memory; None: never configured."""


def install(cpu_checkpointing: bool | None) -> None:
    """Set whether later calls of :func:`checkpoint` keep inputs in host memory; None: as if never configured."""
    global _on_host
    _on_host = cpu_checkpointing


def is_configured() -> bool:
    """Return whether :func:`configure`, or the engine's configuration, set where inputs are kept."""
    return _on_host is not None


def reset() -> None:
    """Do nothing, and keep the settings. Saved inputs live exactly as long as the graph that they belong to, so a
    forward without a backward frees them with its outputs."""


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


# -- the call ----------------------------------------------------------------------


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function(*args, **kwargs)``, and compute it again in backward instead of keeping what it computes.

    With ``cpu_checkpointing`` the tensors among the arguments (not those inside containers) are copied to host memory,
    once for each call, and brought back for backward, those of each call while the one after it is computed again. Both
    copies run on streams of their own. A nested checkpoint keeps nothing, since the outer one computes it again.

    Args:
        function: a function that returns the same outputs for the same inputs and random state.
        *args: passed to ``function``; tensors among them may require gradients.
        **kwargs: passed to ``function`` likewise.

    Returns:
        What ``function`` returns.

    Raises:
        TypeError: ``function`` cannot be called.
    """
    if not callable(function):
        raise TypeError(f"checkpoint takes a function and its arguments, and {shown(function)} cannot be called")
    return compute_again(function, args, kwargs, inputs_on_host=bool(_on_host))

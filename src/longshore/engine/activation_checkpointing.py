"""Activation checkpointing on ``torch.utils.checkpoint``, with the calls of ``deepspeed.checkpointing``.

Everything that a checkpointed function computes is dropped after forward and
computed again in backward; only its inputs are kept, on their device or, with
``cpu_checkpointing``, in host memory. Gradients are the same bits either way,
and the random state is that of the first run.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.utils.checkpoint

from longshore.engine.host_inputs import held_host_bytes, save_on_host
from longshore.engine.wording import did_you_mean, is_integer, shown

__all__ = [
    "CheckpointingSettings",
    "checkpoint",
    "configure",
    "held_host_bytes",
    "install",
    "is_configured",
    "reset",
    "section_problems",
    "settings_from_section",
]

SECTION = "activation_checkpointing"

CANNOT_CHANGE_RESULTS: dict[str, str] = {
    "partition_activations": "it splits saved inputs over model-parallel ranks, and there are none",
    "contiguous_memory_optimization": "it says where saved inputs lie in memory, which torch's allocator decides here",
    "number_checkpoints": "it sizes the buffer of contiguous_memory_optimization",
    "synchronize_checkpoint_boundary": "it waits for the device, and what is computed stays the same",
    "profile": "it logs times; torch.profiler shows them here",
}
"""Keys that are accepted and do nothing, each with the reason."""


@dataclass(frozen=True)
class CheckpointingSettings:
    """``cpu_checkpointing``: keep the inputs of checkpointed functions in host memory."""

    cpu_checkpointing: bool = False


_installed: CheckpointingSettings | None = None
_keep: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
_inside = threading.local()


def install(settings: CheckpointingSettings | None) -> None:
    """Use these settings for every :func:`checkpoint` from now on; ``None`` is as if never configured."""
    global _installed, _keep
    _installed = settings
    _keep = save_on_host if settings is not None and settings.cpu_checkpointing else contextlib.nullcontext


def is_configured() -> bool:
    """Whether :func:`configure` or :func:`install` gave settings."""
    return _installed is not None


def reset() -> None:
    """Nothing to do, since saved inputs live exactly as long as the graph that they belong to: a
    forward that is not followed by a backward frees them with its outputs. Settings stay."""


def section_problems(section: Any) -> list[tuple[str, str]]:
    """Everything that is wrong with the section ``activation_checkpointing`` of a configuration, as (key, problem)."""
    if not isinstance(section, Mapping):
        return [("", f"must be a table, and is {shown(section)}")]
    known = {"cpu_checkpointing", *CANNOT_CHANGE_RESULTS}
    problems = [(str(key), f"is not known; {did_you_mean(key, known)}") for key in section if key not in known]
    for key in sorted(known & set(section)):
        value = section[key]
        if key == "number_checkpoints":
            if value is not None and not (is_integer(value) and value >= 0):
                problems.append((key, f"must be an integer that is not negative, and is {shown(value)}"))
        elif not isinstance(value, bool):
            problems.append((key, f"must be true or false, and is {shown(value)}"))
    return problems


def settings_from_section(section: Mapping[str, Any]) -> CheckpointingSettings:
    """The settings that the section ``activation_checkpointing`` asks for.

    Raises:
        ValueError: all of :func:`section_problems`.
    """
    problems = section_problems(section)
    if problems:
        lines = (f"\n  {SECTION}{'.' * bool(key)}{key}: {problem}" for key, problem in problems)
        raise ValueError("activation checkpointing cannot be configured:" + "".join(lines))
    return CheckpointingSettings(cpu_checkpointing=section.get("cpu_checkpointing", False))


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
        deepspeed_config: a path or a dict, of which ``activation_checkpointing`` is read.
        partition_activations: overrides its key there. Like ``contiguous_checkpointing``, ``num_checkpoints``,
            ``synchronize`` and ``profile`` it is checked, and changes nothing (:data:`CANNOT_CHANGE_RESULTS`
            says why).
        contiguous_checkpointing: overrides ``contiguous_memory_optimization``.
        num_checkpoints: overrides ``number_checkpoints``.
        checkpoint_in_cpu: overrides ``cpu_checkpointing``.
        synchronize: overrides ``synchronize_checkpoint_boundary``.
        profile: overrides its key there.

    Raises:
        ValueError: all that is wrong with the section and the arguments; a file that is no JSON object;
            several model-parallel ranks.
        OSError: a file that cannot be read.
    """
    _check_model_parallel(mpu_)
    section = _section_of(deepspeed_config)
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    overrides = {key: value for key, value in given.items() if value is not None}
    if isinstance(section, Mapping):
        section = {**section, **overrides}
    install(settings_from_section(section))


def _check_model_parallel(mpu: Any) -> None:
    if mpu is None:
        return
    for name in ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size"):
        size = getattr(mpu, name, None)
        if size is not None:
            if size() != 1:
                raise ValueError(
                    f"activation checkpointing does not keep the random states of model-parallel ranks, "
                    f"and mpu_.{name}() is {size()}: use one model-parallel rank, and mpu_=None"
                )
            return
    raise ValueError(
        f"mpu_ must say its get_model_parallel_world_size(), and {type(mpu).__name__} does not: use mpu_=None"
    )


def _section_of(config: str | os.PathLike[str] | Mapping[str, Any] | None) -> Any:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return config.get(SECTION, {})
    try:
        parsed = json.loads(Path(config).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{config} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{config} must hold a JSON object, and holds {shown(parsed)}")
    return parsed.get(SECTION, {})


@contextlib.contextmanager
def _entered() -> Iterator[None]:
    depth = getattr(_inside, "depth", 0)
    _inside.depth = depth + 1
    try:
        yield
    finally:
        _inside.depth = depth


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, computed again in backward instead of kept.

    With ``cpu_checkpointing`` the tensors among the arguments (not those inside of containers) are
    copied to host memory, once for each call, and brought back for backward. A checkpoint within a
    checkpointed function keeps nothing: it is part of what the outer one computes again.

    Args:
        function: gives the same outputs for the same inputs and random state.
        *args: go to ``function``; tensors among them may require gradients.
        **kwargs: likewise.

    Returns:
        What ``function`` returns.

    Raises:
        TypeError: ``function`` cannot be called.
    """
    if not callable(function):
        raise TypeError(f"checkpoint takes a function and its arguments, and {shown(function)} cannot be called")
    names, positional = tuple(kwargs), len(args)

    def run(*values: Any) -> Any:
        with _entered():
            return function(*values[:positional], **dict(zip(names, values[positional:], strict=True)))

    # Keyword arguments go by position: torch saves only positional tensors as autograd does, with a version.
    values = (*args, *kwargs.values())
    # Nested calls, in forward and in the recomputation alike, must be seen by the outer checkpoint's own hooks.
    keep = contextlib.nullcontext if getattr(_inside, "depth", 0) else _keep
    with keep():
        return torch.utils.checkpoint.checkpoint(run, *values, use_reentrant=False)

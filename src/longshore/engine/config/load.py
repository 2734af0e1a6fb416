"""``load_config``: from whatever the user has to a ``Config``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from longshore.engine.config.base import ConfigError, Problem
from longshore.engine.config.batch import DEEPSPEED, BatchNumbers, check_without_ranks, check_world_size, resolve
from longshore.engine.config.model import Config
from longshore.engine.config.reading import Reading
from longshore.engine.config.table import TABLE, TARGETS
from longshore.engine.config.translate import (
    clipping_fields,
    monitor_fields,
    named_fields,
    offload_fields,
    precision_fields,
    wrap_fields,
)

_NO_OPTIMIZER = Problem(
    "optimizer",
    'is missing, and none is passed; name one ("optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}), or pass '
    "initialize(optimizer=...)",
)


class LoadedConfig(NamedTuple):
    """``notes``: what is worth saying, once, on one rank."""

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
    """A DeepSpeed file, the same as a dict, or our own ``Config``.

    Args:
        config: path of a JSON file, a dict, or a ``Config``, which is taken as it is.
        auto: values for keys that are ``"auto"``, by dotted path (``{"optimizer.params.lr": 1e-4}``); others are not
            looked at.
        world_size: ranks. When given, the batch numbers of the result are all set; otherwise see
            :meth:`Config.resolved`.
        needs_optimizer: nobody passes an optimizer, so this has to name one.
        source: name of the configuration in errors; by default that of :func:`read_config`.

    Raises:
        ConfigError: a ValueError with everything that is wrong, each with its path, its value and what to do.
        TypeError: ``config`` is none of the three.
        ValueError: ``world_size`` is not a number of ranks.
    """
    if world_size is not None:
        check_world_size(world_size)
    name, content = read_config(config)
    if isinstance(content, Config):
        return LoadedConfig(_checked(content, world_size, needs_optimizer), ())
    return _translate(content, source or name, auto or {}, world_size, needs_optimizer)


def read_config(
    config: str | os.PathLike[str] | Mapping[str, Any] | Config,
) -> tuple[str, Config | Mapping[str, Any]]:
    """Return the name of a configuration in errors, and its content: a ``Config``, or what the file says."""
    if isinstance(config, Config):
        return "Config", config
    if isinstance(config, Mapping):
        return "config", config
    if isinstance(config, (str, os.PathLike)):
        return str(Path(config)), read_file(Path(config))
    raise TypeError(f"config is a path, a dict or a longshore.Config, not {type(config).__name__}")


def _checked(config: Config, world_size: int | None, needs_optimizer: bool) -> Config:
    """Our own configuration, for so many ranks."""
    problems = [_NO_OPTIMIZER] if needs_optimizer and config.optimizer is None else []
    try:
        config = config if world_size is None else config.resolved(world_size)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError("Config", problems)
    return config


def _translate(
    data: Mapping[Any, Any], source: str, auto: Mapping[str, Any], world_size: int | None, needs_optimizer: bool
) -> LoadedConfig:
    reading = Reading(data, auto)
    fields = {key.field: reading.values[key.path] for key in TABLE if key.field and key.path in reading.values}
    fields |= _batch_fields(reading, data, world_size)
    fields |= precision_fields(reading)
    fields |= clipping_fields(reading, data)
    fields |= offload_fields(reading)
    fields |= wrap_fields(reading)
    fields |= monitor_fields(reading)
    fields |= named_fields(reading)
    if needs_optimizer and "optimizer" not in fields and not reading.has_problem("optimizer"):
        reading.problems.append(_NO_OPTIMIZER)
    config = None
    try:
        config = Config(**fields)
    except ConfigError as error:
        for problem in error.problems:
            path = TARGETS.get(problem.path, "(together)")
            reading.problem(path, problem.what, problem.value)
    if reading.problems or config is None:
        raise ConfigError(source, reading.problems)
    return LoadedConfig(config, tuple(reading.notes))


def _batch_fields(reading: Reading, data: Mapping[Any, Any], world_size: int | None) -> dict[str, int]:
    """The batch numbers, all three when the number of ranks is known."""
    if any(reading.has_problem(name) for name in DEEPSPEED):
        return {}
    given = BatchNumbers(*(reading.values.get(name) for name in DEEPSPEED))
    if given.train is None and given.micro is None:
        state = '"auto", and not filled in' if "auto" in (data.get(DEEPSPEED.train), data.get(DEEPSPEED.micro)) else ""
        what = f"is {state or 'missing'}, and so is {DEEPSPEED.micro}; set one of them"
        reading.problems.append(Problem(DEEPSPEED.train, what))
        return {}
    try:
        if world_size is None:
            check_without_ranks(given, DEEPSPEED)
            return {}
        train, micro, steps = resolve(given, world_size, DEEPSPEED)
    except ValueError as error:
        reading.problem(DEEPSPEED.train, str(error), given.train)
        return {}
    assert train is not None and micro is not None and steps is not None
    return {"train_batch_size": train, "micro_batch_size": micro, "gradient_accumulation_steps": steps}


class _Object(dict[str, Any]):
    """An object of the file; ``json`` alone keeps the last of two equal keys and says nothing."""

    repeated: tuple[str, ...] = ()


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    found = _Object(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        found.repeated = tuple(name for name in found if names.count(name) > 1)
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON; write a number or leave the key out")


def read_file(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ConfigError: the file is missing or unreadable, is not JSON (with line and column), is not an object, or has a
            key twice.
    """

    def refuse(what: str) -> ConfigError:
        return ConfigError(str(path), [Problem("(file)", what)])

    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise refuse("there is no such file; give the path of a JSON file, a dict or a longshore.Config") from None
    except UnicodeDecodeError as error:
        raise refuse(f"must be UTF-8 text, and byte {error.start} is not; save it as UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise refuse(f"cannot be read: {error}") from None
    try:
        data = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise refuse(f"must be JSON, and at {where} it is not: {error.msg}; comments are not JSON either") from None
    except RecursionError:
        raise refuse("must be JSON of a sensible depth; it is nested too deeply") from None
    except ValueError as error:
        raise refuse(f"must be JSON: {error}") from None
    if not isinstance(data, _Object):
        raise refuse(f"must be a JSON object, in braces, and is {_json_name(data)}")
    repeated = _repeated(data, "")
    if repeated:
        raise ConfigError(str(path), repeated)
    return data


def _repeated(value: Any, path: str) -> list[Problem]:
    found: list[Problem] = []
    if isinstance(value, _Object):
        what = "is given more than once; keep one"
        found += [Problem(f"{path}{name}", what) for name in value.repeated]
        for name, inner in value.items():
            found += _repeated(inner, f"{path}{name}.")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            found += _repeated(inner, f"{path}{index}.")
    return found


def _json_name(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return {list: "a list", str: "a string"}.get(type(value), "a number")

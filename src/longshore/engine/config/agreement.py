"""Agreement of a configuration with the arguments of the program around it: a command line, a Trainer, Lightning.

Where the configuration leaves a value open, the argument's is filled in. Where both give one, they have to be equal;
otherwise the error shows both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from longshore.engine.config.base import Problem
from longshore.engine.config.model import Config
from longshore.engine.config.reading import Reading
from longshore.engine.config.table import TARGETS
from longshore.engine.config.values import lookup

_FIELDS = {path: field for field, path in TARGETS.items()}
_INVALID = object()


class ArgumentValue(NamedTuple):
    """What an argument says about one setting.

    Attributes:
        path: dotted path of the setting in a DeepSpeed file.
        value: what the argument says.
        argument: the argument with its value, as errors show it: ``--lr 0.1``.
        advice: what to do about a contradiction.
        fills: whether it also holds where a file has no such key; otherwise only for ``"auto"``.
    """

    path: str
    value: Any
    argument: str
    advice: str
    fills: bool = True


def contradictions(found: Mapping[str, Any], statements: Iterable[ArgumentValue]) -> list[Problem]:
    """A problem for each statement that is about a value in ``found`` (by path) and gives another."""
    return [
        Problem(each.path, f"contradicts {each.argument}; {each.advice}", found[each.path])
        for each in statements
        if each.path in found and _comparable(found[each.path]) != _comparable(each.value)
    ]


def settle(data: dict[str, Any], statements: Iterable[ArgumentValue]) -> list[Problem]:
    """Write each statement into a file's content where that leaves the value open; returns the contradictions.

    A value that is wrong by itself is left to :func:`load_config`.
    """
    statements = list(statements)
    said = Reading(data, {}).values
    for each in statements:
        found = lookup(data, each.path, invalid=_INVALID)
        if each.path not in said and (found == "auto" or (found is None and each.fills)):
            put(data, each.path, each.value)
    return contradictions(said, statements)


def settle_config(config: Config, statements: Iterable[ArgumentValue]) -> tuple[dict[str, Any], list[Problem]]:
    """The same for a :class:`Config`: fields that it leaves open, with the statements' values; and contradictions.

    Statements about hyperparameters that its optimizer does not have are left out.
    """
    fields: dict[str, Any] = {}
    of_optimizer: dict[str, Any] = {}
    problems: list[Problem] = []
    for each in statements:
        section, _, name = each.path.rpartition(".")
        holder, updates = (config, fields) if section != "optimizer.params" else (config.optimizer, of_optimizer)
        name = _FIELDS.get(each.path, name)
        if holder is None or name not in type(holder).model_fields:
            continue
        found = getattr(holder, name) if name in holder.model_fields_set else None
        if found is None:
            updates[name] = each.value
        else:
            where = each._replace(path=name if holder is config else each.path)
            problems += contradictions({where.path: found}, [where])
    if of_optimizer and config.optimizer is not None:
        optimizer = config.optimizer
        given = {name: getattr(optimizer, name) for name in optimizer.model_fields_set}
        fields["optimizer"] = type(optimizer)(**given, **of_optimizer)
    return fields, problems


def put(data: dict[str, Any], path: str, value: Any) -> None:
    """Set a value that is missing or ``"auto"``. Something else than a section on the way is left to the loader."""
    *sections, name = path.split(".")
    for section in sections:
        if data.get(section) is None:
            data[section] = {}
        data = data[section]
        if not isinstance(data, dict):
            return
    if data.get(name) in (None, "auto"):
        data[name] = value


def _comparable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

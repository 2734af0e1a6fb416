"""Agreement of a configuration with the arguments of the program around it: a command line, a Trainer, Lightning.

Where the configuration leaves a setting open, the value of the argument is used. Where both give a value, the two have
to be equal; otherwise the error shows both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from longshore import Config
from longshore.compat.config.kinds import lookup
from longshore.compat.config.reading import Reading
from longshore.compat.config.table import TARGETS
from longshore.engine.config import Problem

_FIELDS = {path: field for field, path in TARGETS.items()}
_INVALID = object()


class ArgumentValue(NamedTuple):
    """The value that an argument gives to one setting.

    Attributes:
        path: dotted path of the setting in a DeepSpeed file.
        value: value of the argument.
        argument: the argument with its value, as errors show it: ``--lr 0.1``.
        advice: how to resolve a contradiction.
        fills: whether it is also used where a file has no such key; otherwise only where the file has ``"auto"``.
    """

    path: str
    value: Any
    argument: str
    advice: str
    fills: bool = True


def contradictions(found: Mapping[str, Any], arguments: Iterable[ArgumentValue]) -> list[Problem]:
    """Return a problem for each argument whose setting has another value in ``found``, which has values by path."""

    def comparable(value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    return [
        Problem(each.path, f"contradicts {each.argument}; {each.advice}", found[each.path])
        for each in arguments
        if each.path in found and comparable(found[each.path]) != comparable(each.value)
    ]


def settle(data: dict[str, Any], arguments: Iterable[ArgumentValue]) -> list[Problem]:
    """Write arguments into a file's content where it leaves their settings open, and return the contradictions.

    Values of the file that are invalid by themselves are left for :func:`load_config` to report.
    """
    arguments = list(arguments)
    valid = Reading(data, {}).values
    for each in arguments:
        found = lookup(data, each.path, invalid=_INVALID)
        if each.path not in valid and (found == "auto" or (found is None and each.fills)):
            put(data, each.path, each.value)
    return contradictions(valid, arguments)


def settle_config(config: Config, arguments: Iterable[ArgumentValue]) -> tuple[dict[str, Any], list[Problem]]:
    """Return the fields that a :class:`Config` leaves open, with the arguments' values, and the contradictions.

    Arguments for hyperparameters that its optimizer does not have are ignored.
    """
    fields: dict[str, Any] = {}
    of_optimizer: dict[str, Any] = {}
    problems: list[Problem] = []
    for each in arguments:
        section, _, name = each.path.rpartition(".")
        holder, updates = (config, fields) if section != "optimizer.params" else (config.optimizer, of_optimizer)
        name = _FIELDS.get(each.path, name)
        if holder is None or name not in type(holder).model_fields:
            continue
        found = getattr(holder, name) if name in holder.model_fields_set else None
        if found is None:
            updates[name] = each.value
        else:
            path = name if holder is config else each.path
            problems += contradictions({path: found}, [each._replace(path=path)])
    optimizer = config.optimizer
    if of_optimizer and optimizer is not None:
        fields["optimizer"] = type(optimizer)(**optimizer.model_dump(exclude_unset=True), **of_optimizer)
    return fields, problems


def put(data: dict[str, Any], path: str, value: Any) -> None:
    """Set a value that is missing or ``"auto"``, and make the sections around it.

    If one of these is not a section, nothing is set, and :func:`load_config` reports it.
    """
    *sections, name = path.split(".")
    for section in sections:
        if data.get(section) is None:
            data[section] = {}
        data = data[section]
        if not isinstance(data, dict):
            return
    if data.get(name) in (None, "auto"):
        data[name] = value

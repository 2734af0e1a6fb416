"""Base classes of the configuration's models, and the error that lists everything wrong with a configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from longshore.engine.config.names import nearest

_LONGEST = 60


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


NOTHING: Any = _Nothing()
"""Stands for a value that is missing."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        path: dotted path in the file, ``zero_optimization.stage``.
        what: the rule and what to do.
        value: what was found, or ``NOTHING``.
    """

    path: str
    what: str
    value: Any = NOTHING

    def __str__(self) -> str:
        return f"{self.path}{'' if self.value is NOTHING else f' = {shown(self.value)}'}: {self.what}"


def shown(value: object) -> str:
    """A value as the file has it, cut to one line."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = object.__repr__(value) if isinstance(value, (dict, list, tuple)) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


class ConfigError(ValueError):
    """A configuration that cannot be used.

    Attributes:
        source: the file, or what stands for it.
        problems: all of them, in the order of the file.
    """

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        lines = (f"  {problem}" for problem in self.problems)
        super().__init__("\n".join((f"{source} has {count}:", *lines)))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, tuple[Problem, ...]]]:
        return type(self), (self.source, self.problems)


class FrozenModel(BaseModel):
    """Frozen, with no fields but its own; what is wrong with a new one is a :class:`ConfigError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)

    if not TYPE_CHECKING:  # checkers know the signature from the fields

        def __init__(self, **values: Any) -> None:
            unknown = [name for name in values if name not in type(self).model_fields]
            known = {name: value for name, value in values.items() if name not in unknown}
            # Unknown names are ours to report, with the nearest; together with whatever else is wrong.
            problems = [Problem(name, self._unknown(name), values[name]) for name in unknown]
            try:
                super().__init__(**known)
            except ValidationError as error:
                problems += [_problem(details) for details in error.errors(include_url=False)]
            if problems:
                raise ConfigError(type(self).__name__, problems)

    @classmethod
    def _unknown(cls, name: str) -> str:
        return f"is not a field of {cls.__name__}{nearest(name, cls.model_fields)}"


def _problem(details: Any) -> Problem:
    path = ".".join(map(str, details["loc"])) or "(all fields)"
    if details["type"] == "missing":
        return Problem(path, "is missing, and has no default; set it", NOTHING)
    what = "must be true or false" if details["type"] == "bool_type" else details["msg"].removeprefix("Value error, ")
    return Problem(path, what, details["input"] if details["loc"] else NOTHING)


class NamedModel(FrozenModel):
    """Something chosen by name, ``type``, and its arguments."""

    def arguments(self) -> dict[str, Any]:
        """The arguments by name, every one of them, without ``type``."""
        return {name: getattr(self, name) for name in type(self).model_fields if name != "type"}

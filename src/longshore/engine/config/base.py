"""What all models of the configuration share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from longshore.engine.config.names import nearest
from longshore.engine.config.problems import NOTHING, ConfigError, Problem


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
        return f"is no field of {cls.__name__}{nearest(name, cls.model_fields)}"


def _problem(details: Any) -> Problem:
    path = ".".join(map(str, details["loc"])) or "(all fields)"
    if details["type"] == "missing":
        return Problem(path, "is missing, and has no default; set it", NOTHING)
    what = details["msg"].removeprefix("Value error, ")
    return Problem(path, what, details["input"] if details["loc"] else NOTHING)


class NamedModel(FrozenModel):
    """Something chosen by name, ``type``, and its arguments."""

    def arguments(self) -> dict[str, Any]:
        """The arguments by name, every one of them, without ``type``."""
        return {name: getattr(self, name) for name in type(self).model_fields if name != "type"}

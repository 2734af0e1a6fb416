"""Base classes of the configuration's models, the error about a configuration, and suggestions for unknown names."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticUndefined as NOTHING


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration.

    Attributes:
        path: dotted path in the file, such as ``zero_optimization.stage``.
        what: the rule, and the remedy.
        value: the value that was found; ``NOTHING`` if it is missing or if several values contradict each other.
    """

    path: str
    what: str
    value: Any = NOTHING

    def __str__(self) -> str:
        path = self.path if len(self.path) <= 200 else f"{self.path[:197]}..."
        return f"{path}{'' if self.value is NOTHING else f' = {json_text(self.value)}'}: {self.what}"


_MOST_LETTERS = 60
"""Length to which values and unknown names are cut in messages. No name is as long."""


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 3]}..."


def json_text(value: object) -> str:
    """Return a value as JSON shows it, cut to 60 characters."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        # Python writes no integer of more than 4300 digits.
        text = object.__repr__(value) if isinstance(value, (dict, list, tuple, int)) else repr(value)
    return _cut(text)


_MOST_LINES = 100


class ConfigError(ValueError):
    """A configuration that cannot be used. The message has the first 100 problems.

    Attributes:
        source: the path of the file, or the name of the class that was built.
        problems: all problems, in the order of the file.
    """

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = [f"{source} has {count} problem{'s' if count != 1 else ''}:", *map(str, self.problems[:_MOST_LINES])]
        if count > _MOST_LINES:
            lines.append(f"and {count - _MOST_LINES} more")
        super().__init__("\n  ".join(lines))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, tuple[Problem, ...]]]:
        return type(self), (self.source, self.problems)


class FrozenModel(BaseModel):
    """A frozen model. All problems of the constructor's arguments are raised as one :class:`ConfigError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)

    if not TYPE_CHECKING:  # checkers know the signature from the fields

        def __init__(self, **values: Any) -> None:
            name, fields = type(self).__name__, type(self).model_fields
            # Unknown names are not passed to pydantic, but reported with the nearest field, beside all other problems.
            problems = [
                Problem(given, f"is not a field of {name}{nearest(given, fields)}", value)
                for given, value in values.items()
                if given not in fields
            ]
            try:
                super().__init__(**{given: value for given, value in values.items() if given in fields})
            except ValidationError as error:
                problems += [_problem(details) for details in error.errors(include_url=False)]
            if problems:
                raise ConfigError(name, problems)


def _problem(details: Any) -> Problem:
    path = ".".join(map(str, details["loc"])) or "(all fields)"
    if details["type"] == "missing":
        return Problem(path, "is missing, and has no default; set it")
    what = "must be true or false" if details["type"] == "bool_type" else details["msg"].removeprefix("Value error, ")
    return Problem(path, what, details["input"] if details["loc"] else NOTHING)


class NamedModel(FrozenModel):
    """A model of something that is chosen by its name, ``type``, and its arguments."""

    def arguments(self) -> dict[str, Any]:
        """Return all arguments by name, without ``type``."""
        return {name: getattr(self, name) for name in type(self).model_fields if name != "type"}


_OTHER_NAMES = {
    ("lr", "warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr"): "learning_rate",
    ("lr", "warmup_max_lr", "cycle_min_lr", "lr_range_test_min_lr"): "base_lr",
    ("lr", "warmup_max_lr", "cycle_max_lr"): "max_lr",
    ("warmup_min_lr", "cycle_min_lr", "lr_range_test_min_lr"): "min_lr",
    ("cos_min_ratio",): "min_lr_ratio",
    ("eps",): "epsilon adam_epsilon",
    ("weight_decay",): "wd decay",
    ("betas",): "beta beta1 beta2 adam_beta1 adam_beta2",
    ("warmup_num_steps",): "warmup warmup_steps warmup_iters warmup_ratio num_warmup_steps",
    ("total_num_steps",): "steps num_steps max_steps total_steps train_steps training_steps num_training_steps t_max",
    ("offload_device",): "offload_optimizer",
}
_ALIASES = {other: ours for ours, others in _OTHER_NAMES.items() for other in others.split()}
"""Names in other libraries (in lower case), and the differently spelled names here that they stand for."""


def quoted(value: object) -> str:
    """Return a name or value as JSON shows it, cut to 60 characters."""
    return f'"{_cut(value)}"' if isinstance(value, str) else _cut(str(value))


def edits(left: str, right: str) -> int:
    """Return the number of insertions, deletions, replacements and swaps of neighbours between two strings."""
    previous: list[int] = []
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        before, previous, row = previous, row, [i]
        for j, b in enumerate(right, 1):
            best = min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                best = min(best, before[j - 2] + 1)
            row.append(best)
    return row[-1]


def alias_of(name: str, known: Iterable[str]) -> list[str]:
    """Return a list with the known name of other libraries' ``name``, or an empty one if there is none."""
    known = set(known)
    called = _ALIASES.get(name.lower().replace("-", "_"), ())
    return [option for option in called if option in known][:1]


def candidates(name: object, known: Iterable[str]) -> list[str]:
    """Return the known names that ``name`` may stand for: that of another library's name, or the most similar ones."""
    if not isinstance(name, str) or len(name) > _MOST_LETTERS:
        return []
    given, known = name.lower(), list(known)
    if called := alias_of(name, known):
        return called
    distances = {option: edits(given, option.lower()) for option in known}
    least = min(distances.values(), default=0)
    if known and least <= max(1, len(given) // 4):
        return [option for option in known if distances[option] == least]
    return difflib.get_close_matches(given, [option for option in known if _of_one_sense(given, option)], 1, 0.7)


def _of_one_sense(left: str, right: str) -> bool:
    """Return whether each word of one name is like a word of the other: ``opt_level`` is no ``log_level``."""
    words, others = (list(filter(None, re.split(r"[\W_]+", name.lower()))) for name in (left, right))
    return all(any(_like(a, b) for b in others) for a in words) or all(any(_like(a, b) for a in words) for b in others)


def _like(left: str, right: str) -> bool:
    short, long = sorted((left, right), key=len)
    return (len(short) >= 3 and long.startswith(short)) or edits(left, right) <= max(1, len(short) // 4)


def suggestion(names: Iterable[str]) -> str:
    """Return ``did you mean ...?``, or an empty string if there is no name."""
    meant = " or ".join(map(quoted, names))
    return f"did you mean {meant}?" if meant else ""


def nearest(name: object, known: Iterable[str]) -> str:
    """Return ``; did you mean ...?`` with the known names that are similar, or an empty string if none is."""
    found = suggestion(candidates(name, known))
    return f"; {found}" if found else ""

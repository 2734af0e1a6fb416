"""Everything that is wrong with a configuration, at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_LONGEST = 60


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


NOTHING: Any = _Nothing()
"""There is no value: something is missing."""


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

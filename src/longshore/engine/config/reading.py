"""A file read through the table: values that are honoured, and everything that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longshore.engine.config.base import NOTHING, Problem
from longshore.engine.config.keys import Key, Treatment, joined
from longshore.engine.config.table import KEYS, OLD_SECTIONS, SECTIONS, unknown
from longshore.engine.config.values import WrongValueError

NAMED = ("optimizer", "scheduler")
"""Sections whose ``type`` says what ``params`` may hold."""


class Reading:
    """One pass over a file.

    Attributes:
        values: checked values of honoured keys, by path, old names replaced.
        problems: in the order of the file.
        notes: what is worth saying once.
    """

    def __init__(self, data: Mapping[Any, Any], auto: Mapping[str, Any]) -> None:
        self.values: dict[str, Any] = {}
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self._auto = auto
        self._old: list[tuple[Key, Any]] = []
        for path, value in auto.items():
            section, _, name = str(path).rpartition(".")
            if (section, name) not in KEYS:
                self.problem(f"auto[{path!r}]", unknown(section, name), value)
        self._section(data, "")
        self._replace_old_names()

    def problem(self, path: str, what: str, value: Any = NOTHING) -> None:
        self.problems.append(Problem(path, what, value))

    def has_problem(self, path: str) -> bool:
        """Whether something is wrong at ``path`` or below."""
        return any(problem.path == path or problem.path.startswith(f"{path}.") for problem in self.problems)

    def _section(self, data: Mapping[Any, Any], section: str, of: str = "") -> None:
        for name, value in data.items():
            key = KEYS.get((section, name)) if isinstance(name, str) else None
            path = joined(section, str(name))
            if not section and name in OLD_SECTIONS:
                self._old_section(data, name, value)
            elif path in SECTIONS and "." not in name:
                self._enter(value, path)
            elif key is None or (of and key.of and of not in key.of):
                self.problem(path, unknown(section, name, of), value)
            else:
                self._key(key, value)

    def _enter(self, value: Any, path: str) -> None:
        if value is None:
            return
        if path == "zero_optimization" and isinstance(value, bool):
            self.values["zero_optimization.stage"] = int(value)
            self.notes.append(f"zero_optimization as true or false is old; it is read as stage {int(value)}")
        elif not isinstance(value, Mapping):
            self.problem(path, "must be a section: an object, in braces", value)
        elif path in NAMED:
            self._named(value, path)
        else:
            self._section(value, path)

    def _named(self, data: Mapping[Any, Any], section: str) -> None:
        rest = {name: value for name, value in data.items() if name != "params"}
        self._section(rest, section)
        if rest.get("type") is None and data:
            self.problem(f"{section}.type", f"is missing; name the {section}, or remove the section")
        of = self.values.get(f"{section}.type")
        params = data.get("params")
        # Without a type that is known there is nothing to check them by.
        if of is None or params is None:
            return
        if isinstance(params, Mapping):
            self._section(params, f"{section}.params", of)
        else:
            self.problem(f"{section}.params", "must be a section: an object, in braces", params)

    def _old_section(self, data: Mapping[Any, Any], name: str, value: Any) -> None:
        new = OLD_SECTIONS[name]
        if new in data:
            self.problem(name, f"is the old name of {new}, which is given too; remove {name}")
        else:
            self.notes.append(f"{name} is an old name; it is read as {new}")
            self._enter(value, new)

    def _key(self, key: Key, value: Any) -> None:
        if isinstance(value, str) and value == "auto" and not key.takes_auto:
            if key.path in self._auto:
                value = self._auto[key.path]
            elif key.treatment is not Treatment.HONOURED or key.absent_when_auto:
                return
            if isinstance(value, str) and value == "auto":
                self.problem(key.path, "is left for another program to fill in, and none has; give a value", value)
                return
        if value is None:
            if key.null:
                self.problem(key.path, key.null, value)
            return
        try:
            checked = key.kind.check(value)
        except WrongValueError as error:
            self.problem(key.path, str(error), value)
            return
        if key.treatment is Treatment.REFUSED and not key.is_harmless(checked):
            self.problem(key.path, f"is not supported: {key.what}", value)
        elif key.treatment is Treatment.HONOURED and key.renamed:
            self._old.append((key, checked))
        elif key.treatment is Treatment.HONOURED:
            self.values[key.path] = checked

    def _replace_old_names(self) -> None:
        for key, value in self._old:
            new = key.new_value(value)
            if new is None:
                self.notes.append(f"{key.path} is an old name; this value has no effect; remove it")
            elif key.renamed in self.values:
                self.problem(key.path, f"is an old name of {key.renamed}, which is given too; remove one", value)
            else:
                self.values[key.renamed] = new
                self.notes.append(f"{key.path} is an old name; it is read as {key.renamed} = {new}")

"""Detect changes that a script makes to a configuration that its engine has already read; checked before each step."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from longshore import LongshoreError
from longshore.compat.config.keys import joined
from longshore.compat.config.table import KEYS, SECTIONS
from longshore.seam import NOTHING, json_text


class ConfigWatch:
    """The settings in a mapping at the time when an engine was made of it.

    Keys that longshore does not know may change: they are the script's. Where the mapping is given for another engine,
    its changes are meant for that one, and those before are not told.
    """

    _latest: ClassVar[WeakValueDictionary[int, ConfigWatch]] = WeakValueDictionary()
    """By the id of the mapping, which the value keeps alive."""

    def __init__(self, given: Any) -> None:
        self._given = given if isinstance(given, Mapping) else {}
        self._before = _known(self._given)

    def begin(self) -> None:
        """Watch from now on; an engine that was made of the same mapping before no longer minds its changes."""
        if (former := self._latest.get(id(self._given))) is not None and former is not self:
            former._given = former._before = {}
        self._latest[id(self._given)] = self

    def check(self) -> None:
        """Raise LongshoreError if a setting has changed."""
        now = _known(self._given)
        if now == self._before:
            return
        changes = [
            f"{path} was {_said(self._before, path)} and is {_said(now, path)}"
            for path in dict.fromkeys((*self._before, *now))
            if self._before.get(path, NOTHING) != now.get(path, NOTHING)
        ]
        raise LongshoreError(
            f"the configuration was changed after initialize() had read it, and the engine goes by what it was: "
            f"{', '.join(changes)}. Put it back, and change a rate or a decay in engine.optimizer.param_groups, the "
            "backwards of a step by engine.set_gradient_accumulation_steps(); if the change is for something else, "
            "make it in a copy (copy.deepcopy)"
        )


def _known(content: Mapping[Any, Any], section: str = "") -> dict[str, Any]:
    """Return the values of the keys that longshore knows, by path."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping):
            if (path := joined(section, str(key))) in SECTIONS:  # another one may be without end
                found |= _known(value, path)
        elif (section, key) in KEYS:
            found[joined(section, key)] = copy.deepcopy(value)
    return found


def _said(values: Mapping[str, Any], path: str) -> str:
    return json_text(values[path]) if path in values else "not given"

"""Kinds of values that only files have: sections that are judged as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from longshore.seam import BOOLEAN, Exactly, Kind, Number

SECTION = Exactly(Mapping, "a section (an object)")


@dataclass(frozen=True)
class Block(Kind):
    """A section that is judged as a whole, by whether it switches anything on.

    Attributes:
        switches: dotted names inside the section, with the values that mean off. None: only an empty section is off.
        on_when_absent: the section is on unless a switch says otherwise.
    """

    switches: Mapping[str, tuple[object, ...]] = field(default_factory=lambda: {"enabled": (False,)})
    on_when_absent: bool = False

    def says(self) -> str:
        return "a section (an object), or false"

    def read(self, value: object) -> object:
        return value if isinstance(value, (Mapping, bool)) else None

    def is_off(self, value: object) -> bool:
        """Return whether a legal value switches nothing on."""
        if not isinstance(value, Mapping) or not value:
            return not value
        given = {name: found for name in self.switches if (found := lookup(value, name)) is not None}
        if not given:
            return bool(self.switches) and not self.on_when_absent
        return all(any(_stands_for(state, off) for off in self.switches[name]) for name, state in given.items())


def _stands_for(value: object, off: object) -> bool:
    kind = BOOLEAN if isinstance(off, bool) else Number()
    return same(value, off) or same(kind.converted(value), off)


def lookup(section: object, path: str, invalid: object = None) -> Any:
    """Return the value at a dotted path; None if it is missing, ``invalid`` if the path leads through a non-section."""
    for name in path.split("."):
        if section is None:
            return None
        if not isinstance(section, Mapping):
            return invalid
        section = section.get(name)
    return section


def same(left: object, right: object) -> bool:
    """Return whether two values are equal, where True and 1 are not."""
    return isinstance(left, bool) == isinstance(right, bool) and left == right

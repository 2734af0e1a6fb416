"""Rows of the table of all keys of a DeepSpeed configuration file.

The rows are in ``table.py``, ``table_training.py`` and ``table_zero.py``;
``docs/deepspeed_config.md`` is generated from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from longshore.engine.config.values import Block, Kind, same


class Treatment(Enum):
    """How longshore treats a key."""

    HONOURED = "honoured"
    """It does what it says, and a test shows it."""
    ACCEPTED = "accepted"
    """It cannot change results. Its value is checked and has no effect."""
    REFUSED = "refused"
    """longshore does not do it. The value that switches it off is fine, any other is an error."""


@dataclass(frozen=True)
class Key:
    """One row.

    Attributes:
        section: dotted path of the section, "" for the top of the file.
        name: the key in it.
        treatment: one of the three classes.
        kind: what its values are.
        what: honoured: what it does; accepted: why it cannot change results; refused: what to do instead.
        field: the field of ``Config`` that takes the value, if it is taken as it is.
        harmless: for refused keys, the values that are fine.
        absent_when_auto: the value ``"auto"`` means that the key is left out.
        takes_auto: ``"auto"`` is a value of this key, and not for another program to fill in.
        of: optimizer or schedule types that have this parameter; () for all.
        renamed: this is an old name, and the path here is the new one.
        values: for an old name, values of the new key by those of the old one; None: the old value is simply dropped.
        null: why null is refused; otherwise null means that the key is left out.
    """

    section: str
    name: str
    treatment: Treatment
    kind: Kind
    what: str
    field: str = ""
    harmless: tuple[object, ...] = ()
    absent_when_auto: bool = False
    takes_auto: bool = False
    of: tuple[str, ...] = ()
    renamed: str = ""
    values: tuple[tuple[object, object], ...] = ()
    null: str = ""

    @property
    def path(self) -> str:
        return joined(self.section, self.name)

    def is_harmless(self, value: object) -> bool:
        """Whether a refused key is switched off by this (checked) value."""
        if isinstance(self.kind, Block):
            return self.kind.is_off(value)
        return any(same(value, one) for one in self.harmless)

    def new_value(self, value: object) -> Any:
        """For an old name: what the new key gets, None for nothing."""
        return next((new for old, new in self.values if same(old, value)), None) if self.values else value


def joined(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def honoured(section: str, name: str, kind: Kind, what: str, field: str = "", **more: Any) -> Key:
    return Key(section, name, Treatment.HONOURED, kind, what, field=field, **more)


def accepted(section: str, name: str, kind: Kind, what: str, **more: Any) -> Key:
    return Key(section, name, Treatment.ACCEPTED, kind, what, **more)


def each_accepted(section: str, names: str, kind: Kind, what: str) -> list[Key]:
    """Rows for several keys, separated by spaces, that are accepted for the same reason."""
    return [accepted(section, name, kind, what) for name in names.split()]


def refused(section: str, name: str, kind: Kind, harmless: tuple[object, ...], what: str, **more: Any) -> Key:
    return Key(section, name, Treatment.REFUSED, kind, what, harmless=harmless, **more)

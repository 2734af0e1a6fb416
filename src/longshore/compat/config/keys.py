"""Rows of the table of all keys of a DeepSpeed configuration file.

The rows are in ``table.py``; ``docs/deepspeed_config.md`` is generated from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from longshore import Config
from longshore.compat.config.kinds import Block, same
from longshore.engine.config import LossScaling
from longshore.seam import BOOLEAN, Kind, kind_in


class Treatment(Enum):
    """How longshore treats a key."""

    HONOURED = "honoured"
    """The key does what it says, and a test shows it."""
    ACCEPTED = "accepted"
    """The key cannot change results. Its value is checked and has no effect."""
    REFUSED = "refused"
    """longshore does not support the key. The value that switches it off is accepted, any other is an error."""


class Auto(Enum):
    """Meaning of ``"auto"`` as the value of a key, if no program fills in another value."""

    ERROR = "an error"
    OMIT = "the key is left out"
    VALUE = "a value of this key, which no program fills in"


@dataclass(frozen=True)
class Key:
    """One row of the table.

    Attributes:
        name: the key in its section. A row in the table may name several, separated by spaces.
        treatment: longshore's use of it.
        kind: its legal values.
        what: if honoured, what it does; if accepted, why it cannot change results; if refused, what to do instead.
        field: the field of ``Config`` or, with a dot, of its ``loss_scaling`` that takes the value as it is.
        harmless: for refused keys, the values that are fine.
        auto: the meaning of ``"auto"``.
        of: optimizer or schedule types that have this parameter; () for all.
        renamed: for an old name, the path of the new one.
        when_true: for an old name that is a switch, the new key's value for true; false is dropped.
        null: why null is refused; otherwise null means that the key is left out.
        section: dotted path of the section, "" for the top of the file.
    """

    name: str
    treatment: Treatment
    kind: Kind
    what: str
    field: str = ""
    harmless: tuple[object, ...] = ()
    auto: Auto = Auto.ERROR
    of: tuple[str, ...] = ()
    renamed: str = ""
    when_true: str = ""
    null: str = ""
    section: str = ""

    @property
    def path(self) -> str:
        return joined(self.section, self.name)

    def is_harmless(self, value: object) -> bool:
        """Whether a refused key is switched off by this (checked) value."""
        if isinstance(self.kind, Block):
            return self.kind.is_off(value)
        return any(same(value, one) for one in self.harmless)


def joined(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def setting(name: str, field: str = "", what: str = "", **more: Any) -> Key:
    """Return a key whose value is stored unchanged in a field, by default that of its name, which also describes it."""
    section, _, last = (field or name).rpartition(".")
    kind = kind_in((LossScaling if section else Config).model_fields[last].metadata)
    return Key(name, Treatment.HONOURED, kind, what, field=field or name, **more)


def honoured(name: str, kind: Kind, what: str, **more: Any) -> Key:
    return Key(name, Treatment.HONOURED, kind, what, **more)


def old_name(name: str, kind: Kind, renamed: str, when_true: str = "") -> Key:
    what = f"Old name: true means {renamed} {when_true}." if when_true else f"Old name of {renamed}."
    return honoured(name, kind, what, renamed=renamed, when_true=when_true)


def accepted(name: str, kind: Kind, what: str, **more: Any) -> Key:
    return Key(name, Treatment.ACCEPTED, kind, what, auto=Auto.OMIT, **more)


def refused(name: str, kind: Kind, harmless: tuple[object, ...], what: str, **more: Any) -> Key:
    return Key(name, Treatment.REFUSED, kind, what, harmless=harmless, auto=Auto.OMIT, **more)


def switch(name: str, what: str) -> Key:
    """Return a refused boolean key, which has to be false or left out."""
    return refused(name, BOOLEAN, (False,), what)


NOT_KEYS: dict[str, str] = {
    "checkpoint_activations": "checkpointing is switched on in the model, with longshore.checkpointing or the model's "
    "own gradient_checkpointing_enable(), and the section activation_checkpointing only tunes it; remove the key",
    "gradient_checkpointing": "checkpointing is switched on in the model, with longshore.checkpointing or the model's "
    "own gradient_checkpointing_enable(); remove the key",
    "partitioned_activations": "the key is partition_activations",
    "opt_level": "it is apex's, which longshore does not use: enable bf16, fp16 or torch_autocast, and remove it",
    "max_grad_norm": "the key is gradient_clipping, at the top of the file",
    "lr": "a learning rate is optimizer.params.lr",
}
"""Names that people write although no version ever read them, with what to do."""

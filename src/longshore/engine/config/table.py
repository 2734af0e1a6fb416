"""The whole table, and how a key is found in it."""

from __future__ import annotations

from longshore.engine.config.keys import Key, joined
from longshore.engine.config.names import alias_of, candidates, edits, quoted
from longshore.engine.config.table_other import LOGGING, NOT_KEYS, OTHER
from longshore.engine.config.table_training import (
    ACTIVATIONS,
    BATCH,
    GRADIENTS,
    HOST,
    OPTIMIZER,
    PRECISION,
    SCHEDULER,
)
from longshore.engine.config.table_zero import OFFLOAD, ZERO

TABLE: tuple[Key, ...] = (
    *BATCH,
    *GRADIENTS,
    *ZERO,
    *OFFLOAD,
    *PRECISION,
    *OPTIMIZER,
    *SCHEDULER,
    *ACTIVATIONS,
    *LOGGING,
    *OTHER,
    *HOST,
)

OLD_SECTIONS = {"bfloat16": "bf16"}
"""Sections under a name that they no longer have."""

KEYS: dict[tuple[str, str], Key] = {(key.section, key.name): key for key in TABLE}


def _with_parents(section: str) -> list[str]:
    parts = section.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


SECTIONS: tuple[str, ...] = tuple(
    dict.fromkeys(parent for key in TABLE if key.section for parent in _with_parents(key.section))
)
"""Dotted paths of all sections, in the order of the table."""

TARGETS: dict[str, str] = {key.field: key.path for key in TABLE if key.field}
"""Paths of the file by fields of ``Config``."""


def names_in(section: str, of: str = "") -> list[str]:
    """Keys and sections that may stand in ``section``; those that ``of`` (a type) has."""
    keys = [key.name for key in TABLE if key.section == section and (not of or not key.of or of in key.of)]
    old = list(OLD_SECTIONS) if not section else []
    return [*keys, *(name for name in (_inside(section, path) for path in SECTIONS) if name), *old]


def _inside(section: str, path: str) -> str:
    parent, _, name = path.rpartition(".")
    return name if parent == section else ""


def unknown(section: str, name: object, of: str = "") -> str:
    """What to say about a name that is not there: the nearest here, and where else it is known."""
    here = f"{section} of {of}" if of else section or "the file's top level"
    said = f"{quoted(name)} is no key of {here}"
    if not isinstance(name, str):
        return f"{said}; keys are strings"
    parent, _, last = name.rpartition(".")
    if name in SECTIONS or (parent, last) in KEYS:
        return f"{said}; sections are objects in objects, so write {quoted(last)} inside {quoted(parent)}"
    if name in NOT_KEYS:
        return f"{said}; {NOT_KEYS[name]}"
    elsewhere = _elsewhere(name, section)
    near = candidates(name, names_in(section, of))
    if elsewhere:  # spelled right, so it has the wrong place, unless a neighbour is one slip away
        near = [known for known in near if edits(name, known) == 1]
    meant = f"did you mean {' or '.join(map(quoted, near))}?" if near else ""
    if meant and not elsewhere:
        return f"{said}; {meant}"
    if of and (section, name) in KEYS:
        return f"{said}; {' and '.join(KEYS[section, name].of)} have it; remove it, or change the type"
    if elsewhere:
        return f"{said}, but of {elsewhere}; move it there" + (f", or {meant}" if meant else "")
    known = dict.fromkeys(key.name for key in TABLE)
    called = alias_of(name, known)
    far = [
        key.path
        for key in TABLE
        if (key.name in called if called else candidates(name, [key.name]))
        and (key.section, key.name) != (section, name)
    ]
    if far:
        return f"{said}; did you mean {' or '.join(map(quoted, dict.fromkeys(far[:3])))}?"
    return f"{said}, nor of any other section; remove it (docs/deepspeed_config.md lists all keys)"


def _elsewhere(name: str, section: str) -> str:
    places = [key.section or "the top level" for key in TABLE if key.name == name and key.section != section]
    places += [path.rpartition(".")[0] or "the top level" for path in SECTIONS if path.rpartition(".")[2] == name]
    return " and ".join(dict.fromkeys(places))


__all__ = ["KEYS", "OLD_SECTIONS", "SECTIONS", "TABLE", "TARGETS", "joined", "names_in", "unknown"]

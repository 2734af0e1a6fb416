"""``docs/deepspeed_config.md``: every key of a DeepSpeed file, from the tables of ``longshore.engine.config``."""

from __future__ import annotations

import re

from longshore.engine.config import Config, LossScaling
from longshore.engine.config.base import quoted
from longshore.engine.config.keys import Auto, Key, Treatment
from longshore.engine.config.optimizers import REFUSED_OPTIMIZERS
from longshore.engine.config.table import NOT_KEYS, OLD_SECTIONS, SECTIONS, TABLE, TARGETS
from longshore.engine.config.values import Block, OneOf
from scripts.docs.docstrings import attributes_of
from scripts.docs.key_tests import TESTS

_INTRODUCTION = """\
# DeepSpeed configuration files

<!-- Generated: python -m scripts.docs -->

`longshore.initialize(config=...)` takes a DeepSpeed JSON file, the same as a dict, or a `longshore.Config`. A file is
translated into a `Config`; every key of it is in one of three classes:

- **honoured**: it does what it says, and the named test shows it;
- **accepted**: it cannot change results; its value is checked and has no effect;
- **refused**: longshore does not do it. The value that switches it off is fine, any other is an error that says what
  to do.

Unknown keys are errors with the nearest known one, and all problems of a file are reported at once. `null` means that
the key is left out, except where a line says otherwise. `true` and `"5"` are not numbers, and 5e8 is an integer.
The keys are those of DeepSpeed 0.19 with the older names that files still have.

**`"auto"`** is for the program that fills a file in: `load_config(..., auto={{"optimizer.params.lr": 1e-4}})` resolves
it by path. Where nothing does, it means that the key is left out for these honoured keys, and for every accepted or
refused one:

{auto}

At any other honoured key it is an error that names the key.
"""


def page() -> str:
    """The whole page."""
    auto = ", ".join(f"`{key.path}`" for key in TABLE if key.treatment is Treatment.HONOURED and key.auto is Auto.OMIT)
    parts = [_INTRODUCTION.format(auto=f"{auto}.")]
    for section in ("", *SECTIONS):
        keys = [key for key in TABLE if key.section == section]
        if keys:
            parts.append(_section(section, keys))
    parts.append(_lists())
    return "\n".join(parts)


def _section(section: str, keys: list[Key]) -> str:
    title = f"## `{section}`" if section else "## The top level"
    old = [name for name, new in OLD_SECTIONS.items() if new == section]
    lines = [title, ""]
    if old:
        lines += [f"Also under its old name `{old[0]}`.", ""]
    lines += ["| key | class | what, or why | test |", "|---|---|---|---|"]
    order = list(Treatment)
    # By class, and inside a class as the table has them.
    lines += [_row(key) for key in sorted(keys, key=lambda key: order.index(key.treatment))]
    return "\n".join([*lines, ""])


def _row(key: Key) -> str:
    of = f" ({', '.join(key.of)})" if key.of else ""
    test = f"`{TESTS[key.path]}`" if key.path in TESTS else ""
    what = " ".join(part for part in (_values(key), *_described(key)) if part)
    return f"| `{key.name}`{of} | {key.treatment.value} | {what} | {test} |".replace("  ", " ")


def _described(key: Key) -> list[str]:
    """What the key does: in its own words, or in those of the field that takes its value, with the field's default."""
    if not key.field:
        return [sentence(key.what)]
    section, _, name = key.field.rpartition(".")
    model = LossScaling if section else Config
    default = model.model_fields[name].default
    # Other fields that it mentions have other names here.
    own = re.sub(r"`(\w+)`", lambda found: f"`{TARGETS.get(found[1], found[1])}`", attributes_of(model)[name])
    texts = [sentence(own), sentence(key.what) if key.what else ""]
    says = "Default:" in "".join(texts)
    return [*texts, "" if says or default is None else f"Default: {_json(default)}."]


def sentence(text: str) -> str:
    """``text`` with a capital (but for names) and a full stop."""
    first = text.split()[0]
    # Names keep their case.
    start = text[0] if "_" in first or first == "longshore" else text[0].upper()
    return f"{start}{text[1:]}" + ("" if text.endswith((".", ".)")) else ".")


def _values(key: Key) -> str:
    """Describe its values; for a refused key, those that are fine."""
    if key.treatment is not Treatment.REFUSED:
        return "" if isinstance(key.kind, Block) else sentence(key.kind.says())
    if isinstance(key.kind, Block):
        return "Fine when off or empty." if key.kind.switches else "Fine when empty."
    if not key.harmless:
        return "Fine when null."
    return f"Fine: {' or '.join(_json(value) for value in key.harmless)}."


def _json(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else quoted(value)


def _lists() -> str:
    lines = ["## Values that are refused by name", "", "| where | value | what to do |", "|---|---|---|"]
    lines += [f"| `optimizer.type` | {name} | {why} |" for name, why in REFUSED_OPTIMIZERS.items()]
    lines += [
        f"| `{key.path}` | {_json(value)} | {why} |"
        for key in TABLE
        if isinstance(key.kind, OneOf) and key.path != "optimizer.type"
        for value, why in key.kind.refused.items()
    ]
    lines += ["", "## Names that are not keys", "", "| name | what to do |", "|---|---|"]
    lines += [f"| `{name}` | {what} |" for name, what in NOT_KEYS.items()]
    return "\n".join([*lines, ""])

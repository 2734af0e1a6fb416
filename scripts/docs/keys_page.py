"""``docs/deepspeed_config.md``: every key of a DeepSpeed file, from the tables of ``longshore.engine.config``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic.fields import FieldInfo

from longshore.compat.config.keys import NOT_KEYS, Auto, Key, Treatment
from longshore.compat.config.kinds import Block
from longshore.compat.config.table import OLD_SECTIONS, SECTIONS, TABLE, TARGETS
from longshore.engine.config import Config, LossScaling
from longshore.engine.config.base import NamedModel, quoted
from longshore.engine.config.optimizers import OPTIMIZER_CONFIGS, REFUSED_OPTIMIZERS
from longshore.engine.config.schedulers import SCHEDULER_CONFIGS
from longshore.engine.config.values import OneOf
from longshore.optim.tiled_optimizer import OPTIMIZERS
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

Unknown keys are errors with the nearest known one, and all problems of a file are reported at once. For a file with
keys of other programs, `LONGSHORE_UNKNOWN_KEYS=warn` in the environment makes unknown keys at its top level warnings;
they are ignored then. Keys that are comments (`_comment`, `comment`, and others that begin with `_`, `//` or `#`) are
ignored with one warning at the top level and in `optimizer`, `scheduler`, `activation_checkpointing` and
`flops_profiler`, where DeepSpeed ignores them, and errors elsewhere, where it refuses them. `null` means that the key
is left out, except where a line says otherwise.

What DeepSpeed converts is converted, with one warning that lists such keys
(`tests/compat/config/test_conversions.py`): 0, 1, `"true"`, `"off"` and the like to true and false, and `"5"` or
`"1e-4"` to numbers. 5e8 is an integer; `true` is not a number. Comments (`//`, `#`, `/* */`) and a comma after the last
entry are read over, with a warning.
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
    """What the key does: in its own words, after those of the field that takes its value; and its default."""
    texts = [sentence(key.what)] if key.what else []
    if key.field:
        section, _, name = key.field.rpartition(".")
        model = LossScaling if section else Config
        # Other fields that it mentions have other names here.
        own = re.sub(r"`(\w+)`", lambda found: f"`{TARGETS.get(found[1], found[1])}`", attributes_of(model)[name])
        texts.insert(0, sentence(own))
        default = model.model_fields[name].default
        if default is not None and "Default:" not in "".join(texts):
            texts.append(f"Default: {_json(default)}.")
    models: Mapping[str, type[NamedModel]] = PARAMETERS.get(key.section, {})
    fields = {of: model.model_fields[key.name] for of, model in models.items() if key.name in model.model_fields}
    return [*texts, *([_defaults(key.name, fields)] if fields else [])]


PARAMETERS: dict[str, Mapping[str, type[NamedModel]]] = {
    "optimizer.params": OPTIMIZER_CONFIGS,
    "scheduler.params": SCHEDULER_CONFIGS,
}

_WITHOUT = {
    "warmup_max_lr": "the group's own",
    **dict.fromkeys(("muon_lr", "adam_lr"), "lr"),
    "adam_weight_decay": "weight_decay",
    "adjust_lr_fn": "original",
    **dict.fromkeys(("split", "others"), "none"),
    "cycle_second_step_size": "the first",
    "cycle_second_stair_count": "the first",
}
"""Meanings of the default None."""


def _defaults(name: str, fields: Mapping[str, FieldInfo]) -> str:
    """The defaults of a parameter, by type, in a DeepSpeed file."""
    if any(field.is_required() for field in fields.values()):
        return "Must be given."
    said: dict[str, list[str]] = {}
    for of, field in fields.items():
        default = OPTIMIZERS[of].file_defaults.get(name, field.default) if of in OPTIMIZERS else field.default
        values = default if isinstance(default, tuple) else (default,)
        words = _WITHOUT[name] if default in (None, ()) else " and ".join(map(_json, values))
        said.setdefault(words, []).append(of)
    if len(said) == 1:
        return f"Default: {next(iter(said))}."
    most_common_first = sorted(said.items(), key=lambda item: -len(item[1]))
    parts = [f"{words} ({', '.join(of)})" for words, of in most_common_first]
    return f"Default: {' or '.join(parts)}."


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

"""Reading of a JSON file, and the check of its values against the table."""

from __future__ import annotations

import io
import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from longshore import ConfigError
from longshore.compat.config.keys import NOT_KEYS, Auto, Key, Treatment, joined
from longshore.compat.config.table import KEYS, OLD_SECTIONS, SECTIONS, TABLE
from longshore.engine.config import Problem
from longshore.seam import NOTHING, WrongValueError, alias_of, candidates, edits, json_text, quoted, suggestion

_MOST_BYTES = 1 << 20
"""Size of the largest file that is read, of which a configuration needs a hundredth."""
_MOST_ADVICE = 20
"""Number of unknown keys of a file that are compared with all known ones, each of which takes some milliseconds."""
UNKNOWN_KEYS = "LONGSHORE_UNKNOWN_KEYS"
"""Variable by which unknown keys at the top level of a file are errors (``error``, the default) or ``warn``."""


class _Object(dict[str, Any]):
    """A JSON object that remembers its repeated keys, of which ``json`` keeps the last value only."""

    repeated: tuple[str, ...] = ()


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    found = _Object(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        found.repeated = tuple(name for name in found if counts[name] > 1)
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON; write a number or leave the key out")


_MOST_DIGITS = 1000
"""Digits of the largest integer that is read, 19 of which are legal. Python reads 4300; its error is about Python."""


class _TooLong(ValueError):
    """An integer that no key can have."""


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        digits = len(text.lstrip("-"))
        raise _TooLong(f"{text[:20]}... is an integer of {digits} digits, and no key may be more than 2**63 - 1")
    return int(text)


def read_file(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, with a warning on rank 0 if it has comments, or commas before a closing
    bracket, which DeepSpeed reads over.

    Raises:
        ConfigError: the file is missing, unreadable, a pipe or a device, or larger than a configuration, is not JSON
            (with line and column), is not an object, or has a key twice.
    """

    def refuse(what: str) -> ConfigError:
        return ConfigError(str(path), [Problem("(file)", what)])

    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for, and a device may have no end
            if path.is_dir():
                raise refuse("is a folder; give the path of the file in it")
            raise refuse("cannot be read: it is a pipe or a device; write its content to a file")
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise refuse(f"is too large to be a configuration: it has more than {_MOST_BYTES} bytes; check the path")
        text = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()
    except ConfigError:
        raise
    except FileNotFoundError:
        raise refuse("there is no such file; give the path of a JSON file, a dict or a longshore.Config") from None
    except UnicodeDecodeError as error:
        raise refuse(f"must be UTF-8 text, and byte {error.start} is not; save it as UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise refuse(f"cannot be read: {error}") from None
    plain, first = _without_comments(text)
    try:
        data = json.loads(plain, object_pairs_hook=_object, parse_int=_integer, parse_constant=_constant)
        repeated = [*_repeated(data, "")]
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise refuse(
            f"must be JSON, and at {where} it is not: {error.msg}; besides JSON, only comments and trailing commas are "
            "allowed"
        ) from None
    except RecursionError:
        raise refuse("must be JSON of a sensible depth; it is nested too deeply") from None
    except _TooLong as error:
        raise refuse(f"cannot be read: {error}") from None
    except ValueError as error:
        raise refuse(f"must be JSON: {error}") from None
    if not isinstance(data, _Object):
        raise refuse(f"must be a JSON object, in braces, and is {json_text(data)}")
    if repeated:
        raise ConfigError(str(path), repeated)
    if plain != text and os.environ.get("RANK", "0") == "0":
        warnings.warn(
            f"{path} has a comment, or a comma too many, at line {first}; longshore reads over it, as DeepSpeed does, "
            "and programs that read JSON only will not",
            stacklevel=2,
        )
    return data


_NOT_JSON = re.compile(
    r"""
    (?: // | \# ) [^\n]*                                     # to the end of the line
    | /\* .*? \*/
    | (?P<kept>
        "[^"\\\n]* (?: \\. [^"\\\n]* )* "?                        # a string, in which nothing is a comment
        | /\* .*                                             # a comment without an end
      )
    """,
    re.VERBOSE | re.DOTALL,
)
"""A string or a comment without an end is matched, too: otherwise all that follows would be searched for its end again
from each of its letters. JSON has an error where it begins."""
_STRING_OR_LAST_COMMA = re.compile(r"""(?P<kept>"[^"\\\n]*(?:\\.[^"\\\n]*)*"?)|,(?=\s*[}\]])""")


def _without_comments(text: str) -> tuple[str, int]:
    """Return a text with spaces in place of comments and of commas before a closing bracket, and the line of the first
    of these. Lines and columns stay."""
    starts: list[int] = []

    def blank(found: re.Match[str]) -> str:
        if found["kept"] is not None:
            return found[0]
        starts.append(found.start())
        return re.sub(r"[^\n]", " ", found[0])

    plain = _STRING_OR_LAST_COMMA.sub(blank, _NOT_JSON.sub(blank, text))
    return plain, text.count("\n", 0, min(starts, default=0)) + 1


def _repeated(value: Any, path: str) -> Iterator[Problem]:
    for name in getattr(value, "repeated", ()):
        yield Problem(f"{path}{name}", "is given more than once; keep one")
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in inside:
        yield from _repeated(inner, f"{path}{name}.")


class Reading:
    """The content of a file, checked against the table.

    Attributes:
        data: the file's content.
        values: checked values of honoured keys, by path, with new names instead of old ones.
        problems: all problems, in the order of the file.
        notes: sentences that are worth showing once.
    """

    def __init__(self, data: Mapping[Any, Any], auto: Mapping[str, Any]) -> None:
        self.data = data
        self.values: dict[str, Any] = {}
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self._auto = auto
        self._old: list[tuple[Key, Any]] = []
        self._unknown = 0
        for path, value in auto.items():
            section, _, name = str(path).rpartition(".")
            if (section, name) not in KEYS:
                self.problem(f"auto[{path!r}]", unknown(section, name), value)
        self._converted: dict[str, list[str]] = {}
        self._comments: list[str] = []
        self._section(data, "")
        self._replace_old_names()
        for how, found in self._converted.items():
            self.notes.append(f"{how}: {', '.join(found)}")
        if self._comments:
            self.notes.append(f"{', '.join(self._comments)}: read as a comment, and ignored, as DeepSpeed ignores it")

    def problem(self, path: str, what: str, value: Any = NOTHING) -> None:
        self.problems.append(Problem(path, what, value))

    def has_problem(self, path: str) -> bool:
        """Return whether there is a problem at ``path`` or below."""
        return any(f"{problem.path}.".startswith(f"{path}.") for problem in self.problems)

    def _section(self, data: Mapping[Any, Any], section: str, of: str = "") -> None:
        for name, value in data.items():
            key = KEYS.get((section, name)) if isinstance(name, str) else None
            path = joined(section, str(name))
            if not section and name in OLD_SECTIONS:
                self._old_section(name, value)
            elif path in SECTIONS and "." not in name:
                self._enter(value, path)
            elif key is None and section in _WITH_COMMENTS and _is_comment(name, section):
                self._comments.append(path)
            elif key is None and not section and _unknown_keys_warn():
                advice = self._advice("", name)
                end = "" if advice.endswith("?") else "."
                self.notes.append(f"{advice}{end} It is ignored, as {UNKNOWN_KEYS}=warn asks")
            elif key is None or (of and key.of and of not in key.of):
                self.problem(path, self._advice(section, name, of), value)
            else:
                self._key(key, value)

    def _advice(self, section: str, name: object, of: str = "") -> str:
        """Describe an unknown name; after some, without a comparison with the names that it may stand for."""
        self._unknown += 1
        return unknown(section, name, of) if self._unknown <= _MOST_ADVICE else _no_key(section, name, of)

    def _enter(self, value: Any, path: str, of: str = "") -> None:
        if value is None:
            return
        if path == "zero_optimization" and isinstance(value, bool):
            self.values["zero_optimization.stage"] = int(value)
            self.notes.append(f"zero_optimization as true or false is old; it is read as stage {int(value)}")
        elif not isinstance(value, Mapping):
            self.problem(path, "must be a section: an object, in braces", value)
        elif path in ("optimizer", "scheduler"):
            self._named(value, path)
        else:
            self._section(value, path, of)

    def _named(self, data: Mapping[Any, Any], section: str) -> None:
        """Read a section whose ``type`` decides which keys ``params`` may have."""
        rest = {name: value for name, value in data.items() if name != "params"}
        self._section(rest, section)
        if rest.get("type") is None and data:
            self.problem(f"{section}.type", f"is missing; name the {section}, or remove the section")
        of = self.values.get(f"{section}.type")
        if of is not None:  # Without a known type, there is nothing to check the parameters against.
            self._enter(data.get("params"), f"{section}.params", of)

    def _old_section(self, name: str, value: Any) -> None:
        new = OLD_SECTIONS[name]
        if new in self.data:
            self.problem(name, f"is the old name of {new}, which is given too; remove {name}")
        else:
            self.notes.append(f"{name} is an old name; it is read as {new}")
            self._enter(value, new)

    def _key(self, key: Key, value: Any) -> None:
        if _is_auto(value) and key.auto is not Auto.VALUE:
            if key.path not in self._auto and key.auto is Auto.OMIT:
                return
            value = self._auto.get(key.path, value)
            if _is_auto(value):
                self.problem(key.path, "is left for another program to fill in, and none has; give a value", value)
                return
        if value is None:
            if key.null:
                self.problem(key.path, key.null, value)
            return
        try:
            checked = key.kind.check(value)
        except WrongValueError as error:
            checked = key.kind.converted(value)
            if checked is None:
                self.problem(key.path, str(error), value)
                return
            self._note_conversion(key, value, checked)
        if key.treatment is Treatment.REFUSED and not key.is_harmless(checked):
            self.problem(key.path, f"is not supported: {key.what}", value)
        elif key.renamed:
            self._old.append((key, checked))
        elif key.treatment is Treatment.HONOURED:
            self.values[key.path] = checked

    def _note_conversion(self, key: Key, value: Any, read: Any) -> None:
        how = (
            "longshore reads these as true or false, which is better written so"
            if isinstance(read, bool)
            else "longshore reads these strings as numbers, which are better written without quotes"
        )
        self._converted.setdefault(how, []).append(f"{key.path} = {json_text(value)} is {json_text(read)}")

    def _replace_old_names(self) -> None:
        for key, value in self._old:
            if key.when_true and not value:
                self.notes.append(f"{key.path} is an old name; this value has no effect; remove it")
            elif key.renamed in self.values:
                self.problem(key.path, f"is an old name of {key.renamed}, which is given too; remove one", value)
            else:
                self.values[key.renamed] = new = key.when_true or value
                self.notes.append(f"{key.path} is an old name; it is read as {key.renamed} = {new}")


def _unknown_keys_warn() -> bool:
    """Return whether unknown keys at the top level are to be ignored with a warning, as DeepSpeed ignores them.

    Raises:
        ValueError: the variable has another value than ``warn`` and ``error``.
    """
    wanted = os.environ.get(UNKNOWN_KEYS, "") or "error"
    if wanted not in ("warn", "error"):
        raise ValueError(f"LONGSHORE_UNKNOWN_KEYS must be warn or error, and is {wanted!r}")
    return wanted == "warn"


_WITH_COMMENTS = ("", "optimizer", "scheduler", "activation_checkpointing", "flops_profiler")
"""Sections in which DeepSpeed ignores keys that it does not know."""


def _is_comment(name: object, section: str) -> bool:
    """Return whether a key that is not known is a person's way of writing a comment, such as ``_comment``."""
    if not isinstance(name, str):
        return False
    if name.lower() in ("comment", "comments"):
        return True
    return name.startswith(("_", "//", "#")) and not any(
        abs(len(each) - len(known)) <= 1 and edits(each, known) <= 1  # a slip, or a key that was switched off
        for known in names_in(section)
        for each in (name, name.strip("_/# "))
    )


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"


def names_in(section: str, of: str = "") -> list[str]:
    """Return the keys and sections allowed in ``section``; with ``of``, a type, only those of that type."""
    keys = [key.name for key in TABLE if key.section == section and (not of or not key.of or of in key.of)]
    inside = [name for parent, _, name in (path.rpartition(".") for path in SECTIONS) if parent == section]
    return [*keys, *inside, *(() if section else OLD_SECTIONS)]


def _no_key(section: str, name: object, of: str) -> str:
    here = f"{section} of {of}" if of else section or "the file's top level"
    return f"{quoted(name)} is not a key of {here}"


def unknown(section: str, name: object, of: str = "") -> str:
    """Describe an unknown name: the nearest name in the section, or the other sections that have it."""
    said = _no_key(section, name, of)
    if not isinstance(name, str):
        return f"{said}; keys are strings"
    parent, _, last = name.rpartition(".")
    if parent and (name in SECTIONS or (parent, last) in KEYS):
        return f"{said}; sections are objects in objects, so write {quoted(last)} inside {quoted(parent)}"
    if name in NOT_KEYS:
        return f"{said}; {NOT_KEYS[name]}"
    if _is_comment(name, section):
        return f"{said}, and DeepSpeed refuses it there too; move the comment to the file's top level, or remove it"
    elsewhere = _elsewhere(name, section)
    near = candidates(name, names_in(section, of))
    if elsewhere:  # The name is right but in the wrong section, unless it is one edit away from a name of this section.
        near = [known for known in near if edits(name, known) == 1]
    meant = suggestion(near)
    if meant and not elsewhere:
        return f"{said}; {meant}"
    if of and (section, name) in KEYS:
        return f"{said}; {' and '.join(KEYS[section, name].of)} have it; remove it, or change the type"
    if elsewhere:
        return f"{said}, but of {elsewhere}; move it there" + (f", or {meant}" if meant else "")
    called = alias_of(name, {key.name for key in TABLE})
    far = [
        key.path
        for key in TABLE
        if (key.name in called if called else candidates(name, [key.name]))
        and (key.section, key.name) != (section, name)
    ]
    if far:
        return f"{said}; {suggestion(dict.fromkeys(far[:3]))}"
    return f"{said}, nor of any other section; remove it (docs/deepspeed_config.md lists all keys)"


def _elsewhere(name: str, section: str) -> str:
    """Return the places other than ``section`` in which ``name`` is a key or a section."""
    places = [key.section for key in TABLE if key.name == name and key.section != section]
    places += [parent for parent, _, last in (path.rpartition(".") for path in SECTIONS) if last == name]
    return " and ".join(dict.fromkeys(place or "the top level" for place in places))

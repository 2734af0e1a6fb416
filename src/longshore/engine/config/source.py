"""A configuration file as a dict: strict JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longshore.engine.config.problems import ConfigError, Problem


class _Object(dict[str, Any]):
    """An object of the file; ``json`` alone keeps the last of two equal keys and says nothing."""

    repeated: tuple[str, ...] = ()


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    found = _Object(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        found.repeated = tuple(name for name in found if names.count(name) > 1)
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON; write a number or leave the key out")


def read_file(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ConfigError: the file is missing or unreadable, is not JSON (with line
            and column), is not an object, or has a key twice.
    """

    def refuse(what: str) -> ConfigError:
        return ConfigError(str(path), [Problem("(file)", what)])

    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise refuse("there is no such file; give the path of a JSON file, a dict or a longshore.Config") from None
    except UnicodeDecodeError as error:
        raise refuse(f"must be UTF-8 text, and byte {error.start} is not; save it as UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise refuse(f"cannot be read: {error}") from None
    try:
        data = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise refuse(f"must be JSON, and at {where} it is not: {error.msg}; comments are not JSON either") from None
    except RecursionError:
        raise refuse("must be JSON of a sensible depth; it is nested too deeply") from None
    except ValueError as error:
        raise refuse(f"must be JSON: {error}") from None
    if not isinstance(data, _Object):
        raise refuse(f"must be a JSON object, in braces, and is {_json_name(data)}")
    repeated = _repeated(data, "")
    if repeated:
        raise ConfigError(str(path), repeated)
    return data


def _repeated(value: Any, path: str) -> list[Problem]:
    found: list[Problem] = []
    if isinstance(value, _Object):
        what = "stands there more than once; keep one"
        found += [Problem(f"{path}{name}", what) for name in value.repeated]
        for name, inner in value.items():
            found += _repeated(inner, f"{path}{name}.")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            found += _repeated(inner, f"{path}{index}.")
    return found


def _json_name(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return {list: "a list", str: "a string"}.get(type(value), "a number")

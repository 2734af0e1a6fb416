"""Nested values in a checkpoint, as JSON and tensors. Reading them executes no code.

JSON has no tuples, no infinities, and only strings as keys. These are written as an object with one key that begins
with ``$``, and so is a dictionary that has such a key itself.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from longshore.checkpoint.files import (
    TensorFile,
    TensorHead,
    WrittenFile,
    checked,
    dtype_name,
    opened,
    read_json,
    write_json,
)
from longshore.errors import CheckpointError

_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_NUMPY_FLOATS = {"$float16": numpy.float16, "$float32": numpy.float32}
_DEEPEST = 64


class Values(NamedTuple):
    """Nested values in their written form: JSON, and tensors by the names that replace them in the JSON."""

    content: Any
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Values:
        """Encode a copy of values, so that they may change afterwards; see :func:`encode`."""
        tensors: dict[str, Tensor] = {}
        content = {key: encode(value, key, tensors) for key, value in values.items()}
        return cls(content, {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()})

    def write(self, folder: Path, stem: str) -> list[WrittenFile]:
        """Write the files ``stem.json`` and, if there are tensors, ``stem.safetensors``. Raises OSError."""
        written = [write_json(folder / f"{stem}.json", self.content)]
        if self.tensors:
            heads = [TensorHead(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]
            with TensorFile(folder / f"{stem}.safetensors", heads) as file:
                for head in file.heads:
                    file.write(self.tensors[head.name])
                written.append(file.finish())
        return written


def encode(value: Any, where: str, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """Encode a value in the types that ``json`` writes.

    Args:
        value: numbers, text, None, lists, tuples, dictionaries with names or integers as keys, and tensors. NumPy's
            numbers become Python's, but for floats of other sizes, with which arithmetic rounds otherwise.
        where: the name of the value in errors.
        tensors: a dictionary to which the tensors are added, without copying.
        depth: the number of levels above the value.

    Raises:
        CheckpointError: the value has another type; the message has its key.
    """
    if depth > _DEEPEST:
        raise CheckpointError(f"{where[:60]}... is nested deeper than {_DEEPEST} levels, or contains itself")
    value = _plain(value)
    # Other subclasses (enums) are rejected, since they would be loaded as another type.
    kind = type(value)
    if kind in (type(None), bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind in _NUMPY_FLOATS.values():
        return {f"${value.dtype.name}": encode(float(value), where, tensors, depth + 1)}
    if isinstance(value, Tensor):
        return {"$tensor": _put(value, where, tensors)}
    if kind in (list, tuple):
        entries = [encode(entry, f"{where}[{place}]", tensors, depth + 1) for place, entry in enumerate(value)]
        return entries if kind is list else {"$tuple": entries}
    if isinstance(value, Mapping):
        for key in map(_plain, value):
            if type(key) not in (str, int):
                raise CheckpointError(f"{where} has the key {key!r}; keys in a checkpoint are names or integers")
        entries = ((_plain(key), entry) for key, entry in value.items())
        items = [[key, encode(entry, f"{where}[{key!r}]", tensors, depth + 1)] for key, entry in entries]
        plain = all(isinstance(key, str) and not key.startswith("$") for key, _ in items)
        return dict(items) if plain else {"$items": items}
    raise CheckpointError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, and a checkpoint can have only numbers, text, lists, "
        "dictionaries and tensors (loading a pickle could run any code); convert it to these (NumPy's arrays: "
        ".tolist(), torch.from_numpy)"
    )


def _plain(value: Any) -> Any:
    """Return a number of NumPy (a schedule written with it has them in its state) as the number of Python that computes
    as it does; whatever else as it is."""
    return value.item() if isinstance(value, numpy.float64 | numpy.integer | numpy.bool_) else value


def _put(value: Tensor, where: str, tensors: dict[str, Tensor]) -> str:
    kind = type(value.detach())
    if kind is not Tensor or value.layout != torch.strided or value.is_meta:
        raise CheckpointError(
            f"{where} is a {kind.__name__} ({value.layout}, {value.device}), and a checkpoint can have only dense, "
            "plain tensors; give this rank's shard of it"
        )
    dtype_name(value.dtype, where)
    name = f"state.{len(tensors)}"
    tensors[name] = value.detach()
    return name


def read_values(folder: Path, stem: str) -> dict[str, Any]:
    """Read values that :meth:`Values.write` wrote. Raises CheckpointError if it is damaged."""
    file, tensor_file = folder / f"{stem}.json", folder / f"{stem}.safetensors"
    content = checked(read_json(file), dict, str(file))
    with contextlib.ExitStack() as stack:
        sources: list[Any] = []
        left: set[str] = set()

        def tensor(name: str) -> Tensor:
            if not sources:
                source, names = stack.enter_context(opened(tensor_file))
                sources.append(source)
                left.update(names)
            if name not in left:
                raise CheckpointError(f"{tensor_file} has no {name}, which {file} names, or names twice")
            # Each tensor may be used only once: otherwise a short file could ask for any number of copies.
            left.remove(name)
            return sources[0].get_tensor(name).clone()

        return {key: decode(value, tensor, f"{file}: {key}") for key, value in content.items()}


def decode(value: Any, tensor: Callable[[str], Tensor], where: str, depth: int = 0) -> Any:
    """Decode a value of :func:`encode`; ``tensor`` returns a tensor by its name.

    Raises:
        CheckpointError: it is not a valid value; ``where`` names it.
    """
    if depth > _DEEPEST:
        raise CheckpointError(f"{where} is nested deeper than {_DEEPEST} levels")
    if isinstance(value, list):
        return [decode(entry, tensor, where, depth + 1) for entry in value]
    if not isinstance(value, dict):
        return value
    special = [key for key in value if key.startswith("$")]
    if not special:
        return {key: decode(entry, tensor, where, depth + 1) for key, entry in value.items()}
    match [*value.items()]:
        case [("$tensor", str(name))]:
            return tensor(name)
        case [("$float", str(name))] if name in _FLOATS:
            return _FLOATS[name]
        case [(str(name), float() | dict() as entry)] if name in _NUMPY_FLOATS:
            number = decode(entry, tensor, where, depth + 1)
            with numpy.errstate(over="ignore"):
                found = _NUMPY_FLOATS[name](number) if type(number) is float else None
            if found is not None and (float(found) == number or math.isnan(number)):
                return found
        case [("$tuple", list(entries))]:
            return tuple(decode(entry, tensor, where, depth + 1) for entry in entries)
        case [("$items", list(entries))] if all(map(_is_item, entries)):
            items = {key: decode(entry, tensor, where, depth + 1) for key, entry in entries}
            if len(items) == len(entries):
                return items
    raise CheckpointError(f"{where} has an entry {special[0]!r} that is not in this format")


def _is_item(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and type(entry[0]) in (str, int)

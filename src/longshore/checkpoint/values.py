"""Nested values in a checkpoint, as JSON and tensors. Reading them executes no code.

JSON has no tuples, no infinities, and only strings as keys. These are written as an object with one key that begins
with ``$``, and so is a dictionary that has such a key itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from longshore.checkpoint.tensor_file import dtype_name
from longshore.errors import CheckpointError

_TENSOR, _TUPLE, _FLOAT, _ITEMS = "$tensor", "$tuple", "$float", "$items"
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_DEEPEST = 64


class Encoder:
    """Encodes values as JSON, and collects their tensors.

    Args:
        prefix: of the tensors' names.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.tensors: dict[str, Tensor] = {}
        """By the names that replace them; not copied."""

    def encode(self, value: Any, where: str, depth: int = 0) -> Any:
        """What ``json`` takes.

        Args:
            value: numbers, text, None, lists, tuples, dictionaries with names or integers as keys, and tensors.
            where: what the value is, as errors name it.
            depth: levels above it.

        Raises:
            CheckpointError: anything else, by its key.
        """
        if depth > _DEEPEST:
            raise CheckpointError(f"{where[:60]}... is nested deeper than {_DEEPEST} levels, or contains itself")
        if value is None or isinstance(value, (bool, int, str)):
            # Subclasses (enums, NumPy's numbers) would be loaded as another type.
            if type(value) in (type(None), bool, int, str):
                return value
        elif type(value) is float:
            return value if math.isfinite(value) else {_FLOAT: repr(value)}
        elif isinstance(value, Tensor):
            return {_TENSOR: self._put(value, where)}
        elif type(value) in (list, tuple):
            entries = [self.encode(entry, f"{where}[{place}]", depth + 1) for place, entry in enumerate(value)]
            return entries if type(value) is list else {_TUPLE: entries}
        elif isinstance(value, Mapping):
            return self._encode_items(value, where, depth)
        raise CheckpointError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, and a checkpoint can have only "
            "numbers, text, lists, dictionaries and tensors (loading a pickle could run any code); convert it to these "
            "(NumPy's: .item(), .tolist(), torch.from_numpy)"
        )

    def _encode_items(self, value: Mapping[Any, Any], where: str, depth: int) -> Any:
        for key in value:
            if type(key) not in (str, int):
                raise CheckpointError(f"{where} has the key {key!r}; keys in a checkpoint are names or integers")
        encoded = [(key, self.encode(entry, f"{where}[{key!r}]", depth + 1)) for key, entry in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in encoded):
            return dict(encoded)
        return {_ITEMS: [list(item) for item in encoded]}

    def _put(self, value: Tensor, where: str) -> str:
        kind = type(value.detach())
        if kind is not Tensor or value.layout != torch.strided or value.is_meta:
            raise CheckpointError(
                f"{where} is a {kind.__name__} ({value.layout}, {value.device}), and a checkpoint can have only dense, "
                "plain tensors; give this rank's shard of it"
            )
        dtype_name(value.dtype, where)
        name = f"{self._prefix}{len(self.tensors)}"
        self.tensors[name] = value.detach()
        return name


def decode(value: Any, tensor: Callable[[str], Tensor], where: str, depth: int = 0) -> Any:
    """Decode a value of :class:`Encoder`; ``tensor`` returns one by its name.

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
    (kind, content), *others = value.items()
    if not others:
        if kind == _TENSOR and isinstance(content, str):
            return tensor(content)
        if kind == _FLOAT and isinstance(content, str) and content in _FLOATS:
            return _FLOATS[content]
        if kind == _TUPLE and isinstance(content, list):
            return tuple(decode(entry, tensor, where, depth + 1) for entry in content)
        if kind == _ITEMS and isinstance(content, list) and all(_is_item(entry) for entry in content):
            items = {key: decode(entry, tensor, where, depth + 1) for key, entry in content}
            if len(items) == len(content):
                return items
    raise CheckpointError(f"{where} has an entry {special[0]!r} that is not in this format")


def _is_item(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and type(entry[0]) in (str, int)

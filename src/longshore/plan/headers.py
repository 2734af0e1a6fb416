"""From the headers of safetensors files to a model; no weight is read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from longshore.checkpoint.tensor_file import DTYPES
from longshore.plan.model import ALL_EXPERTS, PlannedModel, PlannedParameter, Use

_LARGEST_HEADER = 100 << 20
"""As the format's own reader has it."""
_BLOCK = re.compile(r"^(.*?)\.(\d+)\.")
_LOOKED_UP = re.compile(r"(^|[._])(embed\w*|wte|wpe|word_embeddings|tok_embeddings|\w+_embeddings?)\.weight$")
_HEAD = re.compile(r"(^|\.)(lm_head|output|embed_out|head|score)\.weight$")


def plan_of_files(path: Path) -> PlannedModel:
    """Read one file, an index (``model.safetensors.index.json``), or a folder of files.

    What is a block, an embedding or a head is told by names. A model without a head that has an embedding is taken to
    have a tied one.

    Raises:
        ValueError: something else, or a header that is none.
    """
    files = _files(path)
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for file in files:
        for name, entry in _header(file).items():
            if name != "__metadata__":
                tensors[name] = _tensor(file, name, entry)
    floating = {name: each for name, each in tensors.items() if each[0].is_floating_point}
    if not floating:
        raise ValueError(f"{path} has no floating-point tensors; give the weights of a model")
    names = sorted(floating, key=_place)
    embeddings = [name for name in names if _LOOKED_UP.search(name) and len(floating[name][1]) == 2]
    rows = {floating[name][1][0] for name in embeddings}
    heads = [name for name in names if _HEAD.search(name) and floating[name][1][:1] and floating[name][1][0] in rows]
    notes = ["read from a header: the whole of it is trained, and attention itself is not counted"]
    if embeddings and not heads:
        notes.append(f"no head: {embeddings[0]} is taken for a tied one")
        heads, embeddings = embeddings[:1], embeddings[1:]
    if any(".experts." in name for name in names):
        notes.append(ALL_EXPERTS)
    units = {key: number for number, key in enumerate(dict.fromkeys(filter(None, map(_unit, names))))}
    parameters = []
    for name in names:
        dtype, shape = floating[name]
        use = Use.MULTIPLIED if len(shape) > 1 else Use.ELEMENTWISE
        use = Use.HEAD if name in heads else Use.LOOKED_UP if name in embeddings else use
        parameters.append(PlannedParameter(name, shape, dtype, use, units.get(_unit(name) or "")))
    hidden = next((floating[name][1][1] for name in [*heads, *embeddings]), 0)
    buffers = sum(dtype.itemsize * math.prod(shape) for name, (dtype, shape) in tensors.items() if name not in floating)
    title = path.parent.name if path.is_file() and len(files) == 1 and path.stem == "model" else path.stem
    return PlannedModel(title or path.name, tuple(parameters), hidden, 0, buffers, tuple(notes))


def is_weights(path: Path) -> bool:
    """Whether there is something here for :func:`plan_of_files`."""
    if path.is_dir():
        return any(path.glob("*.safetensors"))
    return path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        index = sorted(path.glob("*.safetensors.index.json"))
        return _files(index[0]) if index else sorted(path.glob("*.safetensors"))
    if path.suffix != ".json":
        return [path]
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        listed = {str(name) for name in content["weight_map"].values()}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no index of safetensors files: it has no weight_map ({error})") from error
    missing = sorted(name for name in listed if not (path.parent / name).is_file())
    if missing:
        raise ValueError(f"{path} names {missing[0]} ({len(missing)} such), which is not beside it; headers are needed")
    return [path.parent / name for name in sorted(listed)]


def _header(file: Path) -> Mapping[str, Any]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        size = file.stat().st_size
        if not 2 <= length <= min(_LARGEST_HEADER, size - 8):
            raise ValueError(f"{file} is no safetensors file: its header would have {length} bytes, of {size} in all")
        text = opened.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no safetensors file: its header is no JSON ({error})") from error
    if not isinstance(header, dict):
        raise ValueError(f"{file} is no safetensors file: its header is a {type(header).__name__}")
    return header


def _tensor(file: Path, name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    shape: Any = entry.get("shape") if isinstance(entry, dict) else None
    good = isinstance(shape, list) and all(type(each) is int and each >= 0 for each in shape)
    if not good or str(entry.get("dtype")) not in DTYPES:
        raise ValueError(f"{file}: tensor {name} has no shape and dtype that are known: {str(entry)[:80]}")
    return DTYPES[entry["dtype"]], tuple(shape)


def _unit(name: str) -> str | None:
    found = _BLOCK.match(name)
    return f"{found[1]}.{found[2]}" if found else None


def _place(name: str) -> tuple[Any, ...]:
    """Embeddings, blocks by their numbers, and the rest; as files have them by name, or in no order at all."""
    if _LOOKED_UP.search(name) and _unit(name) is None:
        return (0, 0, "", name)
    found = _BLOCK.match(name)
    if found:
        return (1, int(found[2]), found[1], name)
    return (2, 0, "", name)

"""Read a planned model from a torch module, which may be on the meta device, or from headers of safetensors files."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longshore import Init
from longshore.plan.job import PlannedModel, PlannedParameter, Use
from longshore.seam import SAVED_DTYPES, did_you_mean, is_lazy, module_that_cannot, units_of

_ALL_EXPERTS = "experts are counted as if every token used all of them"

_LARGEST_HEADER = 100 << 20
"""Maximum bytes of a header, as in the format's own reader."""
_BLOCK = re.compile(r"^(.*?)\.(\d+)\.")
_LOOKED_UP = re.compile(r"(^|[._])(embed\w*|wte|wpe|word_embeddings|tok_embeddings|\w+_embeddings?)\.weight$")
_HEAD = re.compile(r"(^|\.)(lm_head|output|embed_out|head|score)\.weight$")


def plan_of_module(module: nn.Module, name: str, head: Tensor | None = None) -> PlannedModel:
    """Read a module without looking at its weights.

    Args:
        module: on any device.
        name: for titles.
        head: the parameter that gives the logits; None: the last Linear with as many rows as an embedding has.
    """
    order = {id(each): place for place, each in enumerate(module.modules())}
    unit_of: dict[int, int] = {}
    for number, unit in enumerate(sorted(units_of(module, "auto"), key=lambda each: order[id(each)])):
        for parameter in unit.parameters():
            unit_of.setdefault(id(parameter), number)
    kinds = _kinds(module)
    if head is None:
        rows = {each.shape[0] for each in module.parameters() if nn.Embedding in kinds[id(each)]}
        linear = [each for each in module.parameters() if nn.Linear in kinds[id(each)] and each.ndim == 2]
        head = next((each for each in reversed(linear) if each.shape[0] in rows), None)
    config = getattr(module, "config", None)
    share = _active_share(config)
    found = []
    for parameter_name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"parameter {parameter_name} has no shape yet: let the function call the model once")
        if parameter is head:
            use = Use.HEAD
        elif kinds[id(parameter)] == {nn.Embedding}:
            use = Use.LOOKED_UP
        else:
            use = Use.MULTIPLIED if parameter.ndim > 1 else Use.ELEMENTWISE
        active = share if use is Use.MULTIPLIED and _is_expert(parameter_name) else 1.0
        shape, unit = tuple(parameter.shape), unit_of.get(id(parameter))
        found.append(
            PlannedParameter(parameter_name, shape, parameter.dtype, use, unit, active, parameter.requires_grad)
        )
    notes = ()
    if share != 1.0:
        notes = (f"each token uses {share:.3g} of the experts",)
    elif any(_is_expert(each.name) for each in found):
        notes = (_ALL_EXPERTS,)
    buffers = sum(each.nbytes for each in module.buffers())
    width = _attention_width(config)
    cannot = module_that_cannot(module)
    return PlannedModel(name, tuple(found), _number(config, "hidden_size"), width, buffers, notes, module, cannot)


def _kinds(module: nn.Module) -> dict[int, set[type]]:
    """Return the kinds of modules that own each parameter, by its ``id``: Embedding, Linear, or any other Module."""
    kinds: dict[int, set[type]] = {}
    for each in module.modules():
        kind = next((known for known in (nn.Embedding, nn.Linear) if isinstance(each, known)), nn.Module)
        for parameter in each.parameters(recurse=False):
            kinds.setdefault(id(parameter), set()).add(kind)
    return kinds


def _is_expert(name: str) -> bool:
    return ".experts." in f".{name}."


def _number(config: Any, *names: str) -> int:
    """Return the first of these attributes that is a positive number, of transformers' configuration or of the text
    model's configuration inside it; otherwise 0."""
    nested = getattr(config, "get_text_config", None)
    configs = [config, *([nested()] if callable(nested) else [])]
    found = (getattr(each, name, 0) for each in configs for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), 0)


def _active_share(config: Any) -> float:
    """Return the share of the experts that one token uses; 1.0 also if the configuration does not say."""
    experts = _number(config, "num_local_experts", "num_experts", "n_routed_experts")
    used = _number(config, "num_experts_per_tok")
    return min(1.0, used / experts) if experts and used else 1.0


def _attention_width(config: Any) -> int:
    """Return heads times head size, summed over all layers."""
    layers, heads = _number(config, "num_hidden_layers"), _number(config, "num_attention_heads")
    return layers * heads * (_number(config, "head_dim") or _number(config, "hidden_size") // heads) if heads else 0


def module_of_function(reference: str) -> nn.Module:
    """Call ``package.module:function`` and return the module that it makes, on the meta device.

    Raises:
        ValueError: there is no such function, or it does not return a module.
    """
    path, _, attribute = reference.partition(":")
    if not all(path.split(".")):
        raise ValueError(f"{reference!r}: give the module's full name, as in package.module:function")
    try:
        found: Any = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if not (path == error.name or path.startswith(f"{error.name}.")):
            raise  # the module exists, but one of its own imports does not
        raise ValueError(
            f"{reference!r}: there is no module {error.name!r} in the current folder, in a folder on PYTHONPATH or in "
            "an installed package; give module:function, where the function makes the model"
        ) from error
    make: Any = found
    for name in attribute.split("."):
        if not hasattr(make, name):
            known = [each for each in vars(found) if callable(vars(found)[each]) and not each.startswith("_")]
            raise ValueError(f"{reference!r}: {path} has no {attribute!r}; {did_you_mean(attribute, known)}")
        make = getattr(make, name)
    if isinstance(make, nn.Module):
        return make
    if not callable(make):
        raise ValueError(f"{reference!r} is a {type(make).__name__}; give a function that returns a torch.nn.Module")
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise ValueError(
            f"{reference} is called without arguments, and needs some ({error}); give a function that needs none"
        ) from error
    except ValueError:
        pass  # some classes have no signature
    with Init(empty=True):
        module = make()
    if not isinstance(module, nn.Module):
        raise ValueError(f"{reference!r} returned a {type(module).__name__}, not a torch.nn.Module")
    return module


def is_weights(path: Path) -> bool:
    """Return whether :func:`plan_of_files` can read this path."""
    if path.is_dir():
        return any(path.glob("*.safetensors"))
    return path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")


def plan_of_files(path: Path) -> PlannedModel:
    """Read headers of one file, of an index (``model.safetensors.index.json``), or of a folder of files.

    Names tell which parameters are blocks, embeddings and heads. A model with an embedding and no head is assumed to
    have a tied head.

    Raises:
        ValueError: a file is not safetensors, or has no floating-point tensors.
    """
    files = _files(path)
    tensors = {name: each for file in files for name, each in _tensors(file).items()}
    floating = {name: each for name, each in tensors.items() if each[0].is_floating_point}
    if not floating:
        raise ValueError(f"{path} has no floating-point tensors; give the weights of a model")
    names = sorted(floating, key=_position)
    embeddings = [name for name in names if _LOOKED_UP.search(name) and len(floating[name][1]) == 2]
    rows = {floating[name][1][0] for name in embeddings}
    heads = [name for name in names if _HEAD.search(name) and floating[name][1][:1] and floating[name][1][0] in rows]
    notes = ["read from a header: all parameters are trained, and attention itself is not counted"]
    if embeddings and not heads:
        notes.append(f"there is no head: {embeddings[0]} is assumed to be tied to it")
        heads, embeddings = embeddings[:1], embeddings[1:]
    if any(map(_is_expert, names)):
        notes.append(_ALL_EXPERTS)
    units = {key: number for number, key in enumerate(dict.fromkeys(filter(None, map(_block_of, names))))}
    parameters = []
    for name in names:
        dtype, shape = floating[name]
        use = Use.MULTIPLIED if len(shape) > 1 else Use.ELEMENTWISE
        use = Use.HEAD if name in heads else Use.LOOKED_UP if name in embeddings else use
        parameters.append(PlannedParameter(name, shape, dtype, use, units.get(_block_of(name) or "")))
    hidden = next((floating[name][1][1] for name in [*heads, *embeddings]), 0)
    buffers = sum(dtype.itemsize * math.prod(shape) for name, (dtype, shape) in tensors.items() if name not in floating)
    title = path.parent.name if path.is_file() and len(files) == 1 and path.stem == "model" else path.stem
    return PlannedModel(title or path.name, tuple(parameters), hidden, 0, buffers, tuple(notes))


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        index = sorted(path.glob("*.safetensors.index.json"))
        return _files(index[0]) if index else sorted(path.glob("*.safetensors"))
    if path.suffix != ".json":
        return [path]
    try:
        listed = {str(name) for name in json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not an index of safetensors files: it has no weight_map ({error})") from error
    missing = sorted(name for name in listed if not (path.parent / name).is_file())
    if missing:
        raise ValueError(
            f"{path} names {len(missing)} files that are not beside it, {missing[0]} first; put them there, since "
            "their headers are read"
        )
    return [path.parent / name for name in sorted(listed)]


def _tensors(file: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtypes and shapes by name, from the header alone."""
    with file.open("rb") as opened:
        length, size = int.from_bytes(opened.read(8), "little"), file.stat().st_size
        if not 2 <= length <= min(_LARGEST_HEADER, size - 8):
            raise ValueError(
                f"{file} is not a safetensors file: its header would have {length} bytes, and the file has {size}"
            )
        text = opened.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a safetensors file: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise ValueError(f"{file} is not a safetensors file: its header is a {type(header).__name__}")
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        shape: Any = entry.get("shape") if isinstance(entry, dict) else None
        valid = isinstance(shape, list) and all(type(each) is int and each >= 0 for each in shape)
        if not valid or str(entry.get("dtype")) not in SAVED_DTYPES:
            raise ValueError(f"{file}: tensor {name} has no valid shape and dtype: {str(entry)[:80]}")
        found[name] = SAVED_DTYPES[entry["dtype"]], tuple(shape)
    return found


def _block_of(name: str) -> str | None:
    found = _BLOCK.match(name)
    return f"{found[1]}.{found[2]}" if found else None


def _position(name: str) -> tuple[int, int, str, str]:
    """Return a sort key: embeddings, then blocks by their numbers, then the rest. Files list tensors in any order."""
    found = _BLOCK.match(name)
    if found:
        return (1, int(found[2]), found[1], name)
    return (0 if _LOOKED_UP.search(name) else 2, 0, "", name)

"""A checkpoint's model as a state dict in memory: each tensor whole, masters where there are any."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from longshore.checkpoint.deepspeed import import_deepspeed
from longshore.checkpoint.deepspeed_files import is_deepspeed
from longshore.checkpoint.export import Weight, chosen, read_weight, weights_of
from longshore.checkpoint.folder import WholeCheckpoint
from longshore.checkpoint.model_state import KIND
from longshore.checkpoint.optimizer_state import array_name, checked_about
from longshore.checkpoint.parts import names_of, stored
from longshore.checkpoint.reading import checked, read_json
from longshore.checkpoint.saving import STATE
from longshore.checkpoint.session import OPTIMIZER
from longshore.checkpoint.storage import SafetensorsReader
from longshore.host import MASTER


def whole_state_dict(
    checkpoint: str | os.PathLike[str], tag: str | None = None, exclude_frozen: bool = False
) -> dict[str, Tensor]:
    """Float32 weights on the CPU under all names that the model has for them, tied ones as one tensor.

    Args:
        checkpoint: what was given to ``save_checkpoint``, of longshore or of DeepSpeed (ZeRO 1, 2 and 3); or one
            checkpoint of longshore's.
        tag: in the folder; None: the latest.
        exclude_frozen: leave out parameters that were not trained.

    Returns:
        Masters, where there are some, and floating-point buffers, as float32; other buffers as they are.

    Raises:
        CheckpointError: it is not there, damaged, or has not all of the model.
        ValueError: no tag.
    """
    root = Path(checkpoint).absolute()
    if not is_deepspeed(root, tag):
        return dict(_tensors(chosen(root, tag), exclude_frozen))
    with tempfile.TemporaryDirectory(prefix="longshore-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # they are about values that are no weights
        return dict(_tensors(chosen(import_deepspeed(root, Path(folder), tag), None), exclude_frozen))


def _tensors(whole: WholeCheckpoint, exclude_frozen: bool) -> Iterator[tuple[str, Tensor]]:
    where = str(whole.path / f"{STATE}.json")
    about = checked(read_json(whole.path / f"{STATE}.json"), dict, where)
    model = checked(about.get(KIND), dict, f"{where}: {KIND}")
    parameters = set(checked(model.get("parameters"), list, f"{where}: parameters"))
    optimizer = about.get(OPTIMIZER)
    stepped = set() if optimizer is None else set(checked_about(optimizer, f"{where}: {OPTIMIZER}")["parameters"])
    frozen = parameters - stepped if exclude_frozen else set()
    reader = SafetensorsReader(whole.path)
    found: dict[str, Tensor] = {}
    for weight in weights_of(whole, reader, torch.float32, all_of_it=not exclude_frozen):
        if weight.head.name not in frozen:
            found[weight.head.name] = _with_master(reader, weight, array_name(MASTER, weight.head.name))
            yield weight.head.name, found[weight.head.name]
    for name, first in checked(model.get("aliases"), dict, f"{where}: aliases").items():
        if first in found:
            yield name, found[first]
    whole.check_unchanged()


def _with_master(reader: SafetensorsReader, weight: Weight, master: str) -> Tensor:
    """Elements whose weight is the rounded master with all of its digits, as training would go on from them."""
    values = read_weight(reader, weight.source, weight.head)
    metadata = reader.read_metadata()
    if weight.source == master or master not in names_of(metadata):
        return values
    digits = read_weight(reader, master, weight.head)
    return torch.where(digits.to(stored(metadata, weight.source).properties.dtype).float() == values, digits, values)

"""Formats of an optimizer's states in a checkpoint.

States that are not float32 are in the files as bfloat16, which holds the numbers of every such format exactly, so that
the same codes are made of them when they are loaded. The format of each parameter's states is among the description's
values; an optimizer with another format converts them, each number to the nearest one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from longshore.errors import CheckpointError
from longshore.layout.formats import StateFormat
from longshore.optim.parameters import ParameterRecord
from longshore.tiles import MASTER

FORMAT = "format"
"""Entry of a parameter whose states are not float32."""
STATES_SEED = "states_seed"
"""Entry of an optimizer that has such states."""


def format_entry(record: ParameterRecord) -> dict[str, str]:
    """Return the entries of a checkpoint for the format of a parameter's states; none if it is float32."""
    format = record.coding.format
    return {} if format is StateFormat.FP32 else {FORMAT: format.value}


def check_format(entry: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError if the format, from an untrusted file, is not one that we know."""
    if entry.get(FORMAT, StateFormat.FP32.value) not in [each.value for each in StateFormat]:
        raise CheckpointError(
            f"{where} has states in the format {entry[FORMAT]!r}, which this version of longshore does not know"
        )


def dtype_in_files(record: ParameterRecord, array: str) -> torch.dtype:
    """Return the dtype that one array of a parameter has in files."""
    encoded = array != MASTER and record.coding.format is not StateFormat.FP32
    return torch.bfloat16 if encoded else torch.float32


def read_as(dtype: torch.dtype, read: Callable[[int, str], Tensor], key: int, array: str) -> Tensor:
    """Return an array of the store in the dtype of :func:`dtype_in_files`."""
    return read(key, array).to(dtype)


def report_conversion(
    about: Mapping[str, Any], among: Mapping[str, str], records: Mapping[str, ParameterRecord], seed: int | None
) -> None:
    """Warn if loaded states were converted from another format, or will be rounded with other random bits.

    Args:
        about: the saved optimizer.
        among: the loaded parameters, by name, with their names in the checkpoint.
        records: this optimizer's parameters.
        seed: its ``states_seed``; None: its states are float32.
    """
    pairs = ((records[name], about["parameters"].get(source)) for name, source in among.items())
    formats = {
        (entry.get(FORMAT, StateFormat.FP32.value), record.coding.format.value)
        for record, entry in pairs
        if entry is not None and {*entry["arrays"]} - {MASTER}
    }
    if changed := [f"{theirs} to {own}" for theirs, own in sorted(formats) if theirs != own]:
        warnings.warn(
            f"the checkpoint's states were converted from {', '.join(changed)}, the format of this optimizer "
            "(states=...), each number to the nearest one",
            stacklevel=2,
        )
    theirs = about.get(STATES_SEED)
    if theirs is not None and seed not in (None, theirs):
        warnings.warn(
            f"the checkpoint is of a run with states_seed={theirs}, and here it is {seed}: the run goes on with other "
            "random bits than there",
            stacklevel=2,
        )

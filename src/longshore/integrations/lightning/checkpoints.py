"""Lightning's checkpoints: a folder written by the engine, which includes Lightning's own state."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longshore.checkpoint.one_line import load
from longshore.engine import Engine
from longshore.errors import CheckpointError

TAG = "checkpoint"
"""The only tag in a folder, whose path Lightning chooses."""
_KEY = "lightning"


def save_folder(engine: Engine, path: Path, rest: Mapping[str, Any]) -> None:
    """Save the engine's checkpoint at ``path``. All ranks have to call it.

    Args:
        engine: between two accumulation windows.
        path: a folder, replaced once the new one is complete.
        rest: Lightning's state, of any type that ``torch.save`` takes; rank 0's is written.

    Raises:
        CheckpointError: in the middle of a window, or if it cannot be written.
    """
    # As bytes: Lightning's callbacks and hyperparameters have any type that torch.save takes.
    buffer = io.BytesIO()
    torch.save(dict(rest), buffer)
    packed = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    with _in_place_of_a_file(path, engine.ranks.rank == 0):
        engine.save_checkpoint(path, tag=TAG, client_state={_KEY: packed})


@contextlib.contextmanager
def _in_place_of_a_file(path: Path, is_first: bool) -> Generator[None, None, None]:
    """Move away a file of that name, from another strategy, and delete it once the folder is complete."""
    if not (is_first and path.is_file()):
        yield
        return
    aside = path.with_name(f"{path.name}.replaced")
    path.rename(aside)
    try:
        yield
    except BaseException:
        if not path.exists():
            aside.rename(path)
        raise
    aside.unlink()


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether :func:`save_folder` wrote ``path``."""
    return (Path(path) / TAG).is_dir()


def load_into_engine(
    engine: Engine, path: Path, *, optimizer: bool, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Load a checkpoint of :func:`save_folder`, on any number of ranks; all have to call. Returns ``rest``.

    Args:
        engine: is loaded into.
        path: the folder.
        optimizer: also load its state, counters, loss scale and random states.
        strict: raise if the model or optimizer does not fit.
        weights_only: as in ``torch.load``, for ``rest``.

    Raises:
        CheckpointError: damaged, or from another model or optimizer; nothing was loaded.
    """
    steps = engine.gradient_accumulation_steps()
    _, client = engine.load_checkpoint(path, tag=TAG, load_module_only=not optimizer, strict=strict)
    # The number of batches in a step is this run's choice.
    engine.set_gradient_accumulation_steps(steps)
    return _rest(client, path, weights_only)


def load_into_model(model: nn.Module, path: Path, *, strict: bool, weights_only: bool | None) -> dict[str, Any]:
    """Load only weights, into a model without an engine; all ranks have to call. Returns ``rest``."""
    return _rest(load(path, model, tag=TAG, strict=strict), path, weights_only)


def _rest(client: Mapping[str, Any] | None, path: Path, weights_only: bool | None) -> dict[str, Any]:
    packed = (client or {}).get(_KEY)
    if not isinstance(packed, Tensor):
        raise CheckpointError(
            f"{path} is a checkpoint of longshore that was not saved by a Trainer or Fabric; "
            "read it with engine.load_checkpoint or longshore.load"
        )
    return torch.load(io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=weights_only)


def unchanged(found: Any, handed_out: Mapping[str, Any]) -> bool:
    """Whether a state dict still has the tensors that the module gave; hooks may change it."""
    return (
        isinstance(found, Mapping)
        and found.keys() == handed_out.keys()
        and all(found[name] is value for name, value in handed_out.items())
    )

"""``longshore.save`` and ``longshore.load``: checkpoints of a loop that is the user's own."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from longshore.checkpoint.crew import Crew
from longshore.checkpoint.folder import check_tag
from longshore.checkpoint.loading import find
from longshore.checkpoint.reading import checked
from longshore.checkpoint.saving import Target, write
from longshore.checkpoint.session import Selection, Session
from longshore.errors import CheckpointError
from longshore.optim.host_optimizer import HostOptimizer
from longshore.optim.shards import is_sharded
from longshore.sharding.groups import twin_of

_RUN = secrets.token_hex(8)
_STATE = "client_state"


def save(
    save_dir: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    tag: str = "last",
    state: Mapping[str, Any] | None = None,
    *,
    keep_last: int | None = None,
) -> Path:
    """Save a model and its longshore optimizer, between two steps, in the format of ``engine.save_checkpoint``.

    With parameters that are ``DTensor`` (FSDP2) all ranks have to call. Otherwise all ranks have the same, and rank 0
    writes it; calls of others do nothing.

    Args:
        save_dir: a folder, made where it is not there.
        model: with the parameters that ``optimizer`` steps.
        optimizer: ``longshore.AdamW`` or another of ours; None: weights only.
        tag: the checkpoint's name in the folder. One of that name is replaced when the new one is whole.
        state: values of yours (schedulers, counters, random numbers): JSON, and tensors.
        keep_last: remove older checkpoints that this process wrote there beyond so many.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: a value that cannot be saved, by its key; gradients that are on the host and would be lost; a
            disk that refuses. What was there before still is.
        ValueError: a tag that is no name of a folder.
    """
    root, ours = Path(save_dir).absolute(), _checked(optimizer)
    check_tag(tag)
    together = _together(model)
    if not together and _rank() != 0:
        return root / tag
    if ours is not None and ours.gradients_arrived:
        raise CheckpointError(
            "a checkpoint has no gradients, and those that release_gradients=True took to the host would be lost: save "
            "right after step(), or after zero_grad()"
        )
    with _Crew(together) as crew:
        session = Session(model, ours, crew)
        step = max((record.step for record in ours.records), default=0) if ours is not None else 0
        content = crew.together(lambda: session.content({_STATE: dict(state or {})}, {}, step, _RUN))
        return write(content, Target(root, tag, True, keep_last), crew)


def load(
    load_dir: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    tag: str | None = None,
    *,
    strict: bool = True,
) -> dict[str, Any] | None:
    """Load what :func:`save`, or an engine, saved; each rank has to call.

    Args:
        load_dir: the folder.
        model: of the same parameters; cut and placed in any way.
        optimizer: of the same kind; None: weights only.
        tag: which one; None: the latest, or, where that is damaged, the newest whole one, with a warning.
        strict: raise where it does not fit; False: skip what does not, with a warning.

    Returns:
        The ``state`` that was saved; None, with a warning, where the folder has no checkpoint at all.

    Raises:
        CheckpointError: damaged, or of another model or optimizer: lists the differences. Nothing was loaded.
    """
    ours = _checked(optimizer)
    with _Crew(_together(model)) as crew:
        whole = find(Path(load_dir).absolute(), tag, crew)
        if whole is None:
            warnings.warn(f"{load_dir} has no checkpoint; nothing was loaded", stacklevel=2)
            return None

        def look(values: Mapping[str, Any]) -> None:
            checked(values.get(_STATE), dict, f"{whole.path}: {_STATE}")

        return Session(model, ours, crew).load(whole, Selection(strict, ours is not None), look)[_STATE]


class _Crew:
    """Of one call: all ranks, or this one alone."""

    def __init__(self, together: bool) -> None:
        self._crew = Crew(twin_of(None, torch.device("cpu"), backend="gloo") if together else None)

    def __enter__(self) -> Crew:
        return self._crew

    def __exit__(self, *_: object) -> None:
        self._crew.close()


def _together(model: nn.Module) -> bool:
    return _world_size() > 1 and any(is_sharded(parameter) for parameter in model.parameters())


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if _world_size() > 1 else 0


def _checked(optimizer: Optimizer | None) -> HostOptimizer | None:
    if optimizer is not None and not isinstance(optimizer, HostOptimizer):
        raise TypeError(
            f"optimizer is one of longshore's, not {type(optimizer).__name__}; save another one with its state_dict()"
        )
    return optimizer

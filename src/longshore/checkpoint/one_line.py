"""``longshore.save`` and ``longshore.load``: checkpoints of a user's own training loop."""

from __future__ import annotations

import contextlib
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

from longshore.checkpoint.files import checked_entry
from longshore.checkpoint.folder import check_tag
from longshore.checkpoint.rank_group import RankGroup
from longshore.checkpoint.saving import Background, Target, memory_for_snapshot, prepare, write
from longshore.checkpoint.training_state import CLIENT_STATE, Selection, TrainingState, find
from longshore.errors import CheckpointError
from longshore.optim.shards import is_sharded
from longshore.optim.tiled_optimizer import TiledOptimizer
from longshore.sharding.collective_thread import twin_of

_RUNS: dict[Path, str] = {}
"""Name of the run that saves in each folder. Loading from a folder continues that folder's run."""
_BACKGROUND = Background()


def save(
    save_dir: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    tag: str = "last",
    state: Mapping[str, Any] | None = None,
    *,
    keep_last: int | None = None,
    async_save: bool = False,
) -> Path:
    """Save a model and its longshore optimizer, between two steps, in the format of ``engine.save_checkpoint``.

    If parameters are ``DTensor`` (FSDP2), all ranks have to call it. Otherwise all ranks have the same values: rank 0
    writes them, and calls on other ranks do nothing.

    Args:
        save_dir: a folder, made if it does not exist.
        model: the model, with the parameters that ``optimizer`` steps.
        optimizer: ``longshore.AdamW`` or another optimizer of longshore; None: save weights only.
        tag: the checkpoint's name in the folder. An existing one is replaced once the new one is complete.
        state: your own values (schedulers, counters, random states): JSON values and tensors.
        keep_last: number of checkpoints to keep; older ones of this process, or of the run that it resumed, are
            removed.
        async_save: return at once, and write while training continues, as in an engine's ``save_checkpoint``.

    Returns:
        The checkpoint's folder; with ``async_save`` it exists after :func:`wait_for_checkpoint`.

    Raises:
        CheckpointError: a value cannot be saved (the message has its key), gradients on the host would be lost, or the
            disk failed. Existing checkpoints are unchanged. With ``async_save`` the next call of this function, of
            :func:`load` or of :func:`wait_for_checkpoint` raises it.
        ValueError: ``tag`` is not a valid tag.
    """
    wait_for_checkpoint()
    root, ours = Path(save_dir).absolute(), _checked(optimizer)
    check_tag(tag)
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(_group_of(model))
        if group.world_size == 1 and _world_size() > 1 and dist.get_rank() != 0:
            return root / tag
        group.together(lambda: _check_no_gradients(ours, "a checkpoint has no gradients, and {} would be lost: save"))
        training = TrainingState(model, ours, group)
        step = max((record.step for record in ours._core.records), default=0) if ours is not None else 0
        memory_bytes = memory_for_snapshot(group) if async_save else None
        values, run = {CLIENT_STATE: dict(state or {})}, _RUNS.setdefault(root, secrets.token_hex(8))
        content = prepare(lambda: training.content(values, {}, step, run, memory_bytes=memory_bytes), group)
        target = Target(root, tag, True, keep_last)
        if not async_save:
            return write(content, target, group)
        closing = stack.pop_all()
        closing.callback(content.close)

        def work() -> None:
            with closing:
                write(content, target, group)

        _BACKGROUND.start(work, f"saving {root / tag}", closing.close)
        return root / tag


def wait_for_checkpoint() -> None:
    """Wait until the checkpoint of ``longshore.save(async_save=True)`` is on the disk.

    Raises:
        CheckpointError, RankError: the checkpoint could not be written; see :func:`save`.
    """
    _BACKGROUND.wait()


def load(
    load_dir: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    tag: str | None = None,
    *,
    strict: bool = True,
) -> dict[str, Any] | None:
    """Load a checkpoint of :func:`save` or of an engine; all ranks have to call it.

    Args:
        load_dir: the folder of checkpoints.
        model: a model with the same parameters, sharded in any way.
        optimizer: an optimizer of the same kind; None: load weights only.
        tag: the checkpoint's tag; None: the latest or, if that is damaged, the newest complete one, with a warning.
        strict: raise if something does not fit; False: skip it, with a warning.

    Returns:
        The ``state`` that was saved; None, with a warning, if the folder has no checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged, or from another model or optimizer (the message lists the
            differences). Nothing was loaded.
    """
    wait_for_checkpoint()
    ours = _checked(optimizer)
    with _group_of(model) as group:
        group.together(lambda: _check_no_gradients(ours, "{} would be applied to the loaded weights: load"))
        whole = find(Path(load_dir).absolute(), tag, group)
        if whole is None:
            what = "nothing was loaded (if this is not the first start, check the path)"
            warnings.warn(f"{load_dir} has no checkpoint; {what}", stacklevel=2)
            return None

        def look(values: Mapping[str, Any]) -> None:
            checked_entry(values, CLIENT_STATE, dict, str(whole.path))

        state = TrainingState(model, ours, group).load(whole, Selection(strict, ours is not None), look)[CLIENT_STATE]
        if whole.run is not None:
            _RUNS[Path(load_dir).absolute()] = whole.run
        return state


def _check_no_gradients(optimizer: TiledOptimizer | None, why: str) -> None:
    if optimizer is not None and optimizer._core.store.broken is None and optimizer._core.gradients_arrived:
        gradients = why.format("gradients that release_gradients=True copied to the host")
        raise CheckpointError(f"{gradients} right after step(), or after zero_grad()")


def _group_of(model: nn.Module) -> contextlib.closing[RankGroup]:
    """Return the group of all ranks if the model is sharded over them, otherwise a group of this rank only."""
    sharded = _world_size() > 1 and any(map(is_sharded, model.parameters()))
    return contextlib.closing(RankGroup(twin_of(None, torch.device("cpu"), backend="gloo") if sharded else None))


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _checked(optimizer: Optimizer | None) -> TiledOptimizer | None:
    if optimizer is not None and not isinstance(optimizer, TiledOptimizer):
        raise TypeError(
            f"optimizer must be one of longshore's, not {type(optimizer).__name__}; save others with their state_dict()"
        )
    return optimizer

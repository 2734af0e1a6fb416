"""``longshore.save`` and ``longshore.load``: checkpoints of a user's own training loop."""

from __future__ import annotations

import contextlib
import os
import secrets
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from longshore.checkpoint.files import checked_entry
from longshore.checkpoint.folder import check_keep_last, check_not_others, check_tag
from longshore.checkpoint.rank_group import RankGroup
from longshore.checkpoint.saving import Background, Target, memory_for_snapshot, prepare, write
from longshore.checkpoint.training_state import CLIENT_STATE, Selection, TrainingState, find
from longshore.errors import CheckpointError, NoCheckpointError, RankError
from longshore.optim.dtensor import data_parallel_wrappers, is_sharded
from longshore.optim.other_optimizers import stands_for
from longshore.optim.tiled_optimizer import TiledOptimizer, core_of
from longshore.ranks.twin_groups import twin_of

_RUNS: dict[Path, str] = {}
"""Name of the run that saves in each folder. Loading from a folder continues that folder's run."""
_BACKGROUND = Background()
RELEASED = "release_gradients"
"""Key among the shared values: whether the saved optimizer took gradients to the host during backward."""


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

    All ranks have to call it. Each writes its own part: shards of ``DTensor`` (FSDP2), and stages of a pipeline, whose
    modules need different names. Ranks that have a parameter of the same name have to have the same values, which is
    verified, and one of them writes it. Only ``DistributedDataParallel`` over all ranks keeps parameters the same: rank
    0 writes them alone, and calls on other ranks do nothing.

    Args:
        save_dir: a folder, made if it does not exist. Ranks that give different folders save independently of each
            other.
        model: the model, with the parameters that ``optimizer`` steps.
        optimizer: ``longshore.AdamW`` or another optimizer of longshore; None: save weights only.
        tag: the checkpoint's name in the folder. An existing one is replaced once the new one is complete.
        state: your own values (schedulers, counters, random states): JSON values and tensors; rank 0's are saved.
        keep_last: number of checkpoints to keep; older ones of this process, or of the run that it resumed, are
            removed.
        async_save: return at once, and write while training continues, as in an engine's ``save_checkpoint``.

    Returns:
        The checkpoint's folder; with ``async_save`` it exists after :func:`wait_for_checkpoint`.

    Raises:
        CheckpointError: a value cannot be saved (the message has its key), gradients on the host would be lost, or the
            disk failed, or ranks have different parameters of the same name (all ranks raise). Existing checkpoints
            are unchanged. With ``async_save`` the next call of this function, of :func:`load` or of
            :func:`wait_for_checkpoint` raises it.
        ValueError: ``tag`` is not a valid tag, or ``keep_last`` is below 1.
        RankError: another rank did not call it in the time in which its process group waits, or has ended.
    """
    wait_for_checkpoint()
    root, ours = Path(save_dir).absolute(), _checked(optimizer)
    check_tag(tag)
    check_keep_last(keep_last)
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(_group_of(model, root / tag))
        if group.process_group is None and _world_size() > 1 and dist.get_rank() != 0:
            return root / tag
        group.together(lambda: _check_no_gradients(ours, "a checkpoint has no gradients, and {} would be lost: save"))
        training = group.together(lambda: TrainingState(model, ours, group))
        if group.world_size > 1:
            training.compare_ranks()
        step = max((record.step for record in core_of(ours).members.records), default=0) if ours is not None else 0
        step = max(group.gather(step))
        memory_bytes = memory_for_snapshot(group) if async_save else None
        run, values = _RUNS.setdefault(root, secrets.token_hex(8)), {CLIENT_STATE: dict(state or {})}
        mode = {} if ours is None else {RELEASED: core_of(ours).members.release_gradients}
        content = prepare(lambda: training.content({**values, **mode}, {}, step, run, memory_bytes=memory_bytes), group)
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
) -> dict[str, Any]:
    """Load a checkpoint of :func:`save` or of an engine; all ranks have to call it.

    Args:
        load_dir: the folder of checkpoints.
        model: a model with the same parameters, sharded in any way.
        optimizer: an optimizer of the same kind; None: load weights only.
        tag: the checkpoint's tag; None: the latest or, if that is damaged, the newest complete one, with a warning.
        strict: raise if something does not fit; False: skip it, with a warning.

    Returns:
        The ``state`` that was saved.

    Raises:
        NoCheckpointError: the folder has no checkpoint at all, as at a first start.
        CheckpointError: the checkpoint is damaged, or from another model or optimizer (the message lists the
            differences). Nothing was loaded.
    """
    wait_for_checkpoint()
    ours = _checked(optimizer)
    with _group_of(model, Path(load_dir).absolute()) as group:
        group.together(lambda: _check_no_gradients(ours, "{} would be applied to the loaded weights: load"))
        group.first(lambda: check_not_others(Path(load_dir).absolute(), tag))
        whole = find(Path(load_dir).absolute(), tag, group)
        if whole is None:
            raise NoCheckpointError(load_dir)

        def look(values: Mapping[str, Any]) -> None:
            checked_entry(values, CLIENT_STATE, dict, str(whole.path))

        training = group.together(lambda: TrainingState(model, ours, group))
        values = training.load(whole, Selection(strict, ours is not None), look)
        if group.rank == 0 and ours is not None:
            compare_modes(ours, values.get(RELEASED, "engine" in values or None), whole.path)
        if whole.run is not None:
            _RUNS[Path(load_dir).absolute()] = whole.run
        return values[CLIENT_STATE]


def compare_modes(optimizer: TiledOptimizer, released: Any, path: Path, stacklevel: int = 3) -> None:
    """Warn if the run that was saved added several backwards in another dtype (older checkpoints do not say which)."""
    members = core_of(optimizer).members
    here, low = members.release_gradients, any(record.dtype != torch.float32 for record in members.records)
    if released is (not here) and low:
        warnings.warn(
            f"{path} was saved with release_gradients={released}, and here it is {here}: where a step has several "
            "backwards they are added in another dtype, and the weights will be those of neither run",
            stacklevel=stacklevel,
        )


def _check_no_gradients(optimizer: TiledOptimizer | None, why: str) -> None:
    core = None if optimizer is None else core_of(optimizer)
    if core is not None and core.members.store.tiles.broken is None and core.window.gradients_arrived:
        gradients = why.format("gradients that release_gradients=True copied to the host")
        raise CheckpointError(f"{gradients} right after step(), or after zero_grad()")


def _group_of(model: nn.Module, path: Path) -> contextlib.closing[RankGroup]:
    """Return the group of the ranks that save or load ``path``; of this rank only if DDP keeps all ranks the same."""
    if _world_size() == 1 or _averaged_over_all_ranks([*model.parameters()]):
        return contextlib.closing(RankGroup())
    doing = f"waiting in longshore.save or load of {path}"
    try:
        group = RankGroup(twin_of(None, torch.device("cpu"), backend="gloo", doing=doing))
        paths = group.gather(str(path))
    except RuntimeError as error:
        raise RankError(f"{path}: longshore.save and load have to be called on all ranks: {error}") from error
    ranks = [rank for rank, theirs in enumerate(paths) if theirs == str(path)]
    if len(ranks) < len(paths):
        group.close()
        group = RankGroup(twin_of(None, torch.device("cpu"), backend="gloo", ranks=ranks))
    return contextlib.closing(group)


def _averaged_over_all_ranks(parameters: Sequence[Tensor]) -> bool:
    """Return whether ``DistributedDataParallel`` keeps all of these parameters the same on all ranks."""
    if not parameters or any(map(is_sharded, parameters)):
        return False
    averaged = {
        id(parameter)
        for wrapper in data_parallel_wrappers()
        if wrapper.process_group.size() == dist.get_world_size() and not wrapper.parameters_to_ignore
        for parameter in wrapper.parameters()
    }
    return all(id(parameter) in averaged for parameter in parameters)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _checked(optimizer: Optimizer | None) -> TiledOptimizer | None:
    optimizer = stands_for(optimizer)
    if optimizer is not None and not isinstance(optimizer, TiledOptimizer):
        raise TypeError(
            f"optimizer must be one of longshore's, not {type(optimizer).__name__}; save others with their state_dict()"
        )
    return optimizer

"""A group of ranks that act together: a failure on one rank is raised on all."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from longshore.errors import BrokenStateError, CheckpointError, RankError

T = TypeVar("T")

_PASSED_ON = (BrokenStateError, CheckpointError, ValueError, TypeError, OSError, FileNotFoundError, PermissionError)
_KINDS = {kind.__name__: kind for kind in _PASSED_ON}
"""Exceptions that are raised as the same kind on the other ranks; others are a RankError there."""


class RankGroup:
    """The ranks that save or load together.

    Args:
        group: a process group with a CPU backend, for Python objects; None: this process only.
    """

    def __init__(self, group: Any = None) -> None:
        self.process_group = group
        self.rank: int = 0 if group is None else dist.get_rank(group)
        self.world_size: int = 1 if group is None else dist.get_world_size(group)

    def gather(self, value: T) -> list[T]:
        """Return each rank's value, by rank; all ranks have to call.

        Raises:
            RankError: another rank has ended.
        """
        if self.world_size == 1:
            return [value]
        assert self.process_group is not None  # closed: None would be the default group
        found: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(found, value, group=self.process_group)
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank}: another rank ended; look at the first error of any rank (complete "
                "checkpoints are unchanged)"
            ) from error
        return found

    def together(self, work: Callable[[], T]) -> T:
        """Run ``work`` on each rank; if it raises on one, all raise, also for Ctrl-C."""
        problem: BaseException | None = None
        result: list[T] = []
        try:
            result.append(work())
        except BaseException as error:
            problem = error
        said = self.gather(None if problem is None else (type(problem).__name__, str(problem)))
        if problem is not None:
            raise problem
        for rank, theirs in enumerate(said):
            if theirs is not None:
                kind, text = theirs
                if kind in _KINDS:
                    raise _KINDS[kind](f"rank {rank}: {text}")
                raise RankError(f"rank {rank}: {kind}: {text}")
        return result[0]

    def first(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the first rank, and return its result on all."""
        mine = self.together(lambda: work() if self.rank == 0 else None)
        return self.gather(mine)[0]  # pyright: ignore[reportReturnType]

    def close(self) -> None:
        """Destroy the process group, which nothing else may use."""
        if self.process_group is not None and dist.is_initialized():
            dist.destroy_process_group(self.process_group)
        self.process_group = None


def save_alone(writer: StorageWriter, planner: SavePlanner, failed: str) -> None:
    """Torch's ``save`` for one process, without its warning: filters for warnings are not thread-safe.

    Args:
        writer: where to write.
        planner: what to write.
        failed: as in :func:`run_planned`.

    Raises:
        CheckpointError: it failed.
    """
    try:
        planner.set_up_planner({}, writer.storage_meta(), is_coordinator=True)
        writer.set_up_storage_writer(True)
        local = writer.prepare_local_plan(planner.create_local_plan())
        plans, metadata = planner.create_global_plan([local])
        (plan,) = writer.prepare_global_plan(plans)
        results = writer.write_data(planner.finish_plan(plan), planner).wait()
        writer.finish(metadata, [results])
    except Exception as error:
        raise CheckpointError(f"{failed}: {reason_of(error)}") from error


def run_planned(call: Callable[..., Any], failed: str, group: RankGroup, **how: Any) -> None:
    """Run torch's ``save`` or ``load``, with errors that say what to do; all ranks have to call.

    Args:
        call: one of the two.
        failed: the beginning of an error's message.
        group: the ranks.
        how: planner and storage.

    Raises:
        CheckpointError: it failed, on any rank.
        RankError: another rank has ended.
    """
    alone = group.world_size == 1
    try:
        with warnings.catch_warnings() if alone else contextlib.nullcontext():
            if alone:
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            call({}, process_group=group.process_group, no_dist=alone, **how)
    except CheckpointException as failure:
        rank, (error, _) = next(iter(failure.failures.items()))
        if not isinstance(error, Exception):
            raise error from failure  # Ctrl-C
        raise CheckpointError(f"{failed}: {'' if alone else f'rank {rank}: '}{reason_of(error)}") from failure
    except RuntimeError as error:
        group.gather(None)  # raises RankError if another rank has ended
        raise CheckpointError(f"{failed}: {error}") from error


def reason_of(error: Exception) -> str:
    """An exception's message, without the number of an OSError."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error)

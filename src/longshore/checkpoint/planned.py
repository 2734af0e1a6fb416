"""``torch.distributed.checkpoint`` as the ranks of a crew call it, with errors that say what to do."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from longshore.checkpoint.crew import Crew
from longshore.errors import CheckpointError


def save_alone(writer: StorageWriter, planner: SavePlanner, failed: str) -> None:
    """What torch's ``save`` does for one process; that one warns of it, and warnings are not for several threads.

    Args:
        writer: where to.
        planner: what.
        failed: as in :func:`planned`.

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
        raise CheckpointError(f"{failed}: {words_of(error)}") from error


def planned(call: Callable[..., Any], failed: str, crew: Crew, **how: Any) -> None:
    """Torch's ``save`` or ``load``; all ranks have to call.

    Args:
        call: which of them.
        failed: what to say where it fails, ahead of why.
        crew: the ranks.
        how: planner and storage.

    Raises:
        CheckpointError: it failed, on whichever rank.
        RankError: another rank is gone.
    """
    alone = crew.world_size == 1
    try:
        with warnings.catch_warnings() if alone else contextlib.nullcontext():
            if alone:
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            call({}, process_group=crew.group, no_dist=alone, **how)
    except CheckpointException as failure:
        rank, (error, _) = next(iter(failure.failures.items()))
        if not isinstance(error, Exception):
            raise error from failure  # Ctrl-C
        raise CheckpointError(f"{failed}: {'' if alone else f'rank {rank}: '}{words_of(error)}") from failure
    except RuntimeError as error:
        crew.gather(None)  # says so where another rank is gone
        raise CheckpointError(f"{failed}: {error}") from error


def words_of(error: Exception) -> str:
    """Without the number of an OSError."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error)

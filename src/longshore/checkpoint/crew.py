"""Processes that do something together, and how a failure of one reaches all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from longshore.errors import BrokenStateError, CheckpointError, RankError

T = TypeVar("T")

_PASSED_ON = (BrokenStateError, CheckpointError, ValueError, TypeError, OSError, FileNotFoundError, PermissionError)
_KINDS = {kind.__name__: kind for kind in _PASSED_ON}
"""What a failure on one rank is on the others; anything else is a RankError there."""


class Crew:
    """Processes of one group.

    Args:
        group: on which Python objects can be sent between hosts; None: this process alone.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.rank: int = 0 if group is None else dist.get_rank(group)
        self.world_size: int = 1 if group is None else dist.get_world_size(group)

    def gather(self, value: T) -> list[T]:
        """What each process has; all have to call.

        Raises:
            RankError: one of them is gone.
        """
        if self.world_size == 1:
            return [value]
        assert self.group is not None  # closed: None would be the default group
        found: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(found, value, group=self.group)
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank}: another rank ended; look at the first error of any rank (checkpoints that were "
                "whole before still are)"
            ) from error
        return found

    def together(self, work: Callable[[], T]) -> T:
        """Each process does its part; where one fails, all raise. Ctrl-C is told to the others, too."""
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
                raise (
                    _KINDS[kind](f"rank {rank}: {text}")
                    if kind in _KINDS
                    else RankError(f"rank {rank}: {kind}: {text}")
                )
        return result[0]

    def first(self, work: Callable[[], T]) -> T:
        """What the first process's ``work`` returns, on all of them."""
        mine = self.together(lambda: work() if self.rank == 0 else None)
        return self.gather(mine)[0]  # pyright: ignore[reportReturnType]

    def close(self) -> None:
        """Let go of the group, which has to be this crew's own."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None

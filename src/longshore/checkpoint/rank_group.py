"""A group of ranks that act together: a failure on one rank is raised on all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from longshore.errors import BrokenStateError, CheckpointError, RankError
from longshore.ranks.waiting import gather_from_all, gather_objects

T = TypeVar("T")

_KINDS = {
    kind.__name__: kind
    for kind in (BrokenStateError, CheckpointError, ValueError, TypeError, OSError, FileNotFoundError, PermissionError)
}
"""Exceptions that the other ranks raise as the same type. For all others they raise RankError."""
_ADVICE = "look at the first error of any rank (complete checkpoints are unchanged)"


class RankGroup:
    """The ranks that save or load together.

    Args:
        group: a process group of gloo, or the default one; None: this process only.

    Attributes:
        lost: whether a rank of it is missing, so that the others cannot tell each other anything more.
    """

    def __init__(self, group: Any = None) -> None:
        self.process_group = group
        self.rank: int = 0 if group is None else dist.get_rank(group)
        self.world_size: int = 1 if group is None else dist.get_world_size(group)
        self.lost = False

    def gather(self, value: T) -> list[T]:
        """Return each rank's value, by rank; all ranks have to call it.

        Raises:
            RankError: another rank has ended.
        """
        if self.world_size == 1:
            return [value]
        assert self.process_group is not None  # not closed: torch would take None as the default group
        if self.process_group is dist.group.WORLD:  # which may have no backend for the CPU
            return gather_from_all("setting up an engine", value)
        try:
            return gather_objects(value, self.process_group, _ADVICE)
        except RankError:
            self.lost = True
            raise

    def gather_differing(self, value: T) -> list[T]:
        """As :meth:`gather`, for large values of built-in types: only digests are sent if all ranks have the same."""
        digests = self.gather(hashlib.sha256(repr(value).encode()).digest())
        return [value] * self.world_size if len(set(digests)) == 1 else self.gather(value)

    def together(self, work: Callable[[], T]) -> T:
        """Run ``work`` on each rank. If it raises on one rank, also because of Ctrl-C, all ranks raise."""
        try:
            result = work()
        except BaseException as problem:
            self.gather((type(problem).__name__, str(problem)))
            raise
        said: list[Any] = self.gather(None)
        for rank, theirs in enumerate(said):
            if theirs is not None:
                kind, text = theirs
                if kind in _KINDS:
                    raise _KINDS[kind](f"rank {rank}: {text}")
                raise RankError(f"rank {rank}: {kind}: {text}")
        return result

    def first(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the first rank, and return its result on all."""
        mine = self.together(lambda: work() if self.rank == 0 else None)
        return self.gather(mine)[0]  # pyright: ignore[reportReturnType]

    def close(self) -> None:
        """Destroy the process group, which nothing else may use."""
        if self.process_group is not None and dist.is_initialized():
            dist.destroy_process_group(self.process_group)
        self.process_group = None


def reason_of(error: Exception) -> str:
    """Return an exception's message, without the number of an OSError."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error)

"""The group of ranks that make a run, and what they agree on beside the training itself."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from longshore.cli.failure import CommandError, SharedError
from longshore.engine.ranks import Ranks, join
from longshore.errors import RankError

T = TypeVar("T")

_TIMEOUT = timedelta(minutes=30)
_LOST = "another rank has ended: its own line says why; if it left none, the system killed it"


class _Failure(NamedTuple):
    message: str
    exit_code: int


class RunGroup:
    """This process and the other ranks of its run; a run may have one rank.

    All ranks call each method, in the same order. They communicate on the CPU, in a process group of their own, so
    that collectives of the engine that are under way do not interfere.

    Args:
        ranks: None for one process that trains without the engine.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        self.rank = 0 if ranks is None else ranks.rank
        self.size = 1 if ranks is None else ranks.world_size
        self._ranks = ranks
        self._group: Any = dist.new_group(backend="gloo", timeout=_TIMEOUT) if self.size > 1 else None

    @classmethod
    def join(cls) -> RunGroup:
        """Return the group of the ranks that the launcher started.

        Raises:
            CommandError: the launcher's variables contradict each other, or a device is missing.
            RendezvousError: the other ranks did not come.
        """
        try:
            return cls(join())
        except ValueError as error:
            raise CommandError(str(error)) from error

    @property
    def leads(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    def largest(self, number: int) -> int:
        """Return the largest ``number`` of all ranks."""
        return int(self._reduced([number], torch.int64, dist.ReduceOp.MAX)[0])

    def mean(self, number: float) -> float:
        """Return the mean over all ranks; the same bits on each."""
        return self.sums([number])[0] / self.size

    def sums(self, numbers: list[float]) -> list[float]:
        """Return the sum of each entry over all ranks, in float64; the same bits on each."""
        return self._reduced(numbers, torch.float64, dist.ReduceOp.SUM)

    def together(self, work: Callable[[], T]) -> T:
        """Do ``work``, which does not communicate, so that it succeeds on all ranks or fails on all.

        Raises:
            SharedError: it failed on some rank; rank 0 prints the messages of all of them.
        """
        failure: Exception | None = None
        result: Any = None
        try:
            result = work()
        except Exception as error:
            failure = error
        if self.size == 1:
            if failure is not None:
                raise failure
            return result
        told = _Failure(str(failure) or type(failure).__name__, getattr(failure, "exit_code", 1))
        failures: list[_Failure | None] = [None] * self.size
        self.guarded(lambda: dist.all_gather_object(failures, None if failure is None else told, group=self._group))
        if failure is not None and not isinstance(failure, CommandError):
            raise failure
        if any(failures):
            raise SharedError(*_combined(failures)) from failure
        return result

    def guarded(self, work: Callable[[], T]) -> T:
        """Do ``work``, which communicates; raise CommandError if another rank is lost meanwhile."""
        if self.size == 1:
            return work()
        try:
            return work()
        except (RankError, RuntimeError) as error:
            if not _is_lost_rank(error):
                raise
            raise CommandError(_LOST) from error

    def close(self) -> None:
        """Leave the group, on all ranks, while nothing is under way."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
        if self._ranks is not None:
            self._ranks.close()

    def _reduced(self, numbers: list[Any], dtype: torch.dtype, operation: Any) -> list[Any]:
        if self.size == 1:
            return numbers
        values = torch.tensor(numbers, dtype=dtype)
        self.guarded(lambda: dist.all_reduce(values, operation, group=self._group))
        return values.tolist()


def _is_lost_rank(error: BaseException | None) -> bool:
    """Whether gloo or nccl reports that another process is gone. That error has no type of its own."""
    while error is not None:
        text = str(error)
        if isinstance(error, dist.DistError) or "gloo" in text or "Connection closed by peer" in text:
            return True
        error = error.__cause__
    return False


def _combined(failures: list[_Failure | None]) -> tuple[str, int]:
    """Return one line and an exit code; a message that all ranks have is not repeated."""
    found = [(rank, failure) for rank, failure in enumerate(failures) if failure is not None]
    messages = {failure.message for _, failure in found}
    exit_code = max(failure.exit_code for _, failure in found)
    is_shared = len(messages) == 1 and len(found) == len(failures)
    if is_shared or [rank for rank, _ in found] == [0]:
        return messages.pop(), exit_code
    return "; ".join(f"rank {rank}: {failure.message}" for rank, failure in found), exit_code

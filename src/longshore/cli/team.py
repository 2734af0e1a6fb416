"""The ranks of a run as the command line sees them: what they agree on beside the training itself."""

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


class Team:
    """This process and the others of its run; also where it is the only one.

    Every method is a meeting: all ranks call it, in the same order. They meet
    on the CPU, in a group of their own, so that the engine's collectives, which
    may be under way, are not in between.

    Args:
        ranks: None for one process that trains without the engine.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        self.rank = 0 if ranks is None else ranks.rank
        self.size = 1 if ranks is None else ranks.world_size
        self._ranks = ranks
        self._group: Any = dist.new_group(backend="gloo", timeout=_TIMEOUT) if self.size > 1 else None

    @classmethod
    def join(cls) -> Team:
        """With the ranks that the launcher started.

        Raises:
            CommandError: its variables contradict each other, or a device is missing.
            RendezvousError: the others did not come.
        """
        try:
            return cls(join())
        except ValueError as error:
            raise CommandError(str(error)) from error

    @property
    def leads(self) -> bool:
        """Whether this is the rank that shows and writes."""
        return self.rank == 0

    def largest(self, number: int) -> int:
        """Over all ranks."""
        return int(self._reduced([number], torch.int64, dist.ReduceOp.MAX)[0])

    def mean(self, number: float) -> float:
        """Over all ranks; the same bits on each."""
        return self.sums([number])[0] / self.size

    def sums(self, numbers: list[float]) -> list[float]:
        """Over all ranks, of each entry; in float64, the same bits on each."""
        return self._reduced(numbers, torch.float64, dist.ReduceOp.SUM)

    def together(self, work: Callable[[], T]) -> T:
        """``work``, which does not communicate; it succeeds on all ranks or fails on all.

        Raises:
            SharedError: it failed on some rank, and rank 0 says what all of those have to say.
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
        self._guarded(lambda: dist.all_gather_object(failures, None if failure is None else told, group=self._group))
        if failure is not None and not isinstance(failure, CommandError):
            raise failure
        if any(failures):
            raise SharedError(*_combined(failures)) from failure
        return result

    def guarded(self, work: Callable[[], T]) -> T:
        """``work``, which communicates by itself; a rank that is lost meanwhile is a ``CommandError``."""
        return self._guarded(work) if self.size > 1 else work()

    def close(self) -> None:
        """Leave; on all ranks, and with nothing under way."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
        if self._ranks is not None:
            self._ranks.close()

    def _reduced(self, numbers: list[Any], dtype: torch.dtype, operation: Any) -> list[Any]:
        if self.size == 1:
            return numbers
        values = torch.tensor(numbers, dtype=dtype)
        self._guarded(lambda: dist.all_reduce(values, operation, group=self._group))
        return values.tolist()

    def _guarded(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except (RankError, RuntimeError) as error:
            if not _is_lost_rank(error):
                raise
            raise CommandError(_LOST) from error


def _is_lost_rank(error: BaseException | None) -> bool:
    """Whether this is what gloo or nccl says when another process is gone. It has no type of its own."""
    while error is not None:
        text = str(error)
        if isinstance(error, dist.DistError) or "gloo" in text or "Connection closed by peer" in text:
            return True
        error = error.__cause__
    return False


def _combined(failures: list[_Failure | None]) -> tuple[str, int]:
    """One line and an exit code for what failed, said once where all say the same."""
    found = [(rank, failure) for rank, failure in enumerate(failures) if failure is not None]
    messages = {failure.message for _, failure in found}
    exit_code = max(failure.exit_code for _, failure in found)
    if len(messages) == 1 and len(found) == len(failures):
        return messages.pop(), exit_code
    if [rank for rank, _ in found] == [0]:
        return messages.pop(), exit_code
    return "; ".join(f"rank {rank}: {failure.message}" for rank, failure in found), exit_code

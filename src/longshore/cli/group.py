"""The ranks of a run, their agreements besides the training itself, and the signals that end it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from longshore import RankError
from longshore.cli.terminal import CommandError, SharedError, StopNow
from longshore.seam import finish, gather_objects, join, presence, twin_of, words

T = TypeVar("T")

_STDERR = 2
_LOST = "its own line says why; if it left none, the system killed it, or the network to it is cut"


class RunGroup:
    """This process and the other ranks of its run; a run may have one rank.

    All ranks call each method, in the same order. They communicate on the CPU, in a process group of their own, so
    that collectives of the engine that are under way do not interfere.

    Args:
        joins: whether to join the ranks that the launcher started. Otherwise this process trains alone.

    Raises:
        CommandError: the launcher's variables contradict each other, or a device is missing.
        RendezvousError: the other ranks did not come.
    """

    def __init__(self, joins: bool = False) -> None:
        try:
            self._ranks = join() if joins else None
        except ValueError as error:
            raise CommandError(str(error)) from error
        self.rank, self.size = (0, 1) if self._ranks is None else (self._ranks.rank, self._ranks.world_size)
        self._group: Any = twin_of(None, torch.device("cpu"), "gloo") if self.size > 1 else None

    @property
    def leads(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    def largest(self, number: int) -> int:
        """Return the largest ``number`` of all ranks."""
        return self._reduced([number], torch.int64, dist.ReduceOp.MAX)[0]

    def sums(self, numbers: list[float]) -> list[float]:
        """Return the sum of each entry over all ranks, in float64; the same bits on each."""
        return self._reduced(numbers, torch.float64, dist.ReduceOp.SUM)

    def _reduced(self, numbers: list[Any], dtype: torch.dtype, operation: Any) -> list[Any]:
        if self.size == 1:
            return numbers
        values = torch.tensor(numbers, dtype=dtype)
        self.guarded(lambda: finish(dist.all_reduce(values, operation, self._group, async_op=True), self._group))
        return values.tolist()

    def together(self, work: Callable[[], T]) -> T:
        """Do ``work``, which does not communicate, so that it succeeds on all ranks or fails on all.

        Raises:
            SharedError: it failed on some rank; rank 0 prints the messages of all of them.
        """
        if self.size == 1:
            return work()
        failure: Exception | None = None
        message: tuple[str, int] | None = None
        result: Any = None
        try:
            result = work()
        except Exception as error:
            failure, message = error, (str(error) or type(error).__name__, getattr(error, "exit_code", 1))
        messages = self.guarded(lambda: gather_objects(message, self._group))
        if failure is not None and not isinstance(failure, CommandError):
            raise failure
        if any(messages):
            raise SharedError(*_combined(messages)) from failure
        return result

    def guarded(self, work: Callable[[], T]) -> T:
        """Do ``work``, which communicates; raise CommandError if another rank is lost meanwhile."""
        try:
            return work()
        except (RankError, RuntimeError) as error:
            if self.size == 1 or not _is_lost_rank(error):
                raise
            here = presence()
            lost = [] if here is None else here.who_broke(range(self.size))
            raise CommandError(f"{words(lost)}: {_LOST}") from error

    def close(self) -> None:
        """Leave the group, on all ranks, while nothing is under way."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
        if self._ranks is not None:
            self._ranks.close()


def _is_lost_rank(error: BaseException | None) -> bool:
    """Return whether gloo or nccl reports that another process is gone. That error has no type of its own."""
    while error is not None:
        text = str(error)
        lost = "cannot be reached" in text or "gloo" in text or "Connection closed by peer" in text
        if isinstance(error, dist.DistError) or lost:
            return True
        error = error.__cause__
    return False


def _combined(messages: list[tuple[str, int] | None]) -> tuple[str, int]:
    """Return one line and an exit code for the messages and exit codes of all ranks; a message that all ranks have
    appears once."""
    found = {rank: message for rank, message in enumerate(messages) if message is not None}
    different = {text for text, _ in found.values()}
    exit_code = max(code for _, code in found.values())
    if (len(different) == 1 and len(found) == len(messages)) or found.keys() == {0}:
        return different.pop(), exit_code
    return "; ".join(f"rank {rank}: {text}" for rank, (text, _) in found.items()), exit_code


class StopSignals:
    """A context in which signals ask to end after the current step; a second Ctrl-C or SIGTERM ends at once.

    SIGHUP (a terminal was closed) and SIGUSR1 (a batch system's warning) only ask. A signal that was ignored, as under
    nohup, stays ignored. Any rank of ``group`` may receive one; the first rank says so.
    """

    _URGENT = signal.SIGINT, signal.SIGTERM
    _OTHERS = signal.SIGHUP, signal.SIGUSR1

    def __init__(self, group: RunGroup) -> None:
        self._group = group
        self._received = 0
        self._urgent = False
        self._agreed = 0
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in (*self._URGENT, *self._OTHERS):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if number in self._URGENT:
            if self._urgent:
                raise StopNow(128 + number)
            self._urgent = True
        if self._received:
            return
        self._received = number
        if self._group.leads:
            # print() is not used, since the signal may have interrupted one.
            with contextlib.suppress(OSError):
                os.write(_STDERR, b"\nlongshore: ending after this step; once more ends at once\n")

    def __call__(self) -> bool:
        """Return whether any rank received a signal; all ranks call this at the same place."""
        self._agreed = self._group.largest(self._received)
        return self._agreed != 0

    @property
    def name(self) -> str:
        """The name of the signal on which the ranks agreed last."""
        return "Ctrl-C" if self._agreed == signal.SIGINT else signal.Signals(self._agreed).name

    @property
    def exit_code(self) -> int:
        """128 plus the signal, as shells report it; 0 if none came."""
        return 128 + self._agreed if self._agreed else 0

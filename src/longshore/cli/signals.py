"""Ctrl-C and SIGTERM: the first asks to end after the current step, the second ends at once."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

_STDERR = 2


class StopNow(BaseException):
    """The second signal. It is raised wherever the program is, so that a file that is half written is removed.

    Like KeyboardInterrupt it is not an Exception, so that no handler treats it as a failure to recover from.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code


class StopSignals:
    """A context in which ``received`` is the signal that came. A signal that was ignored stays ignored.

    Args:
        quiet: print nothing, on all ranks but one.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._received: signal.Signals | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    @property
    def received(self) -> int:
        """The signal's number; 0 if none came."""
        return 0 if self._received is None else int(self._received)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._received is not None:
            raise StopNow(128 + number)
        self._received = signal.Signals(number)
        if self._quiet:
            return
        # Not print(): the signal may have come during one.
        with contextlib.suppress(OSError):
            os.write(_STDERR, b"\nlongshore: ending after this step; once more ends at once\n")


class AgreedStop:
    """Whether to end now: the same answer on all ranks, any of which may have received a signal.

    Args:
        signals: those of this process.
        largest: returns the largest number of all ranks, which communicate.
    """

    def __init__(self, signals: StopSignals, largest: Callable[[int], int]) -> None:
        self._signals = signals
        self._largest = largest
        self._agreed = 0

    def __call__(self) -> bool:
        """Return whether any rank received a signal; all ranks call this at the same place."""
        self._agreed = self._largest(self._signals.received)
        return self._agreed != 0

    @property
    def name(self) -> str:
        """The name of the signal on which the ranks agreed last."""
        return "Ctrl-C" if self._agreed == signal.SIGINT else "SIGTERM"

    @property
    def exit_code(self) -> int:
        """128 plus the signal, as shells report it; 0 if none came."""
        return 128 + self._agreed if self._agreed else 0

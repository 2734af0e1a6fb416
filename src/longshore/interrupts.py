"""Ctrl-C that waits until a state or a step is whole."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class _Deferral:
    """A handler that notes the first Ctrl-C, and leaves the second one to the handler that it replaced."""

    def __init__(self) -> None:
        self.deferred = False
        self._former: Any = signal.getsignal(signal.SIGINT)  # it may be called within the next line
        self._former = signal.signal(signal.SIGINT, self)

    def __call__(self, *_: object) -> None:
        self.deferred = True
        self.end()

    def end(self) -> None:
        signal.signal(signal.SIGINT, self._former)


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Take a first Ctrl-C (SIGINT) at the end of the outermost of such blocks, and a second one at once.

    Python handles signals in the main thread alone, so in another one there is nothing to defer.
    """
    handler = signal.getsignal(signal.SIGINT)
    elsewhere = threading.current_thread() is not threading.main_thread()
    if elsewhere or not callable(handler) or isinstance(handler, _Deferral):
        yield  # ignored, or a handler that was not installed from Python, or deferred already
        return
    defer = _Deferral()
    try:
        yield
    finally:
        defer.end()
        if defer.deferred:
            signal.raise_signal(signal.SIGINT)

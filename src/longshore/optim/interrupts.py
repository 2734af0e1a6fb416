"""Ctrl-C that waits until a state or a step is whole."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


class _Deferral:
    """A handler that notes the first Ctrl-C, and leaves the second one to the ``former`` handler."""

    def __init__(self, former: Callable[..., Any]) -> None:
        self.deferred = False
        self._former = former

    def __call__(self, *_: object) -> None:
        self.deferred = True
        signal.signal(signal.SIGINT, self._former)


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Take a first Ctrl-C (SIGINT) at the end of the outermost of such blocks, and a second one at once.

    Python handles signals in the main thread alone, so in another one there is nothing to defer.
    """
    former = signal.getsignal(signal.SIGINT)
    elsewhere = threading.current_thread() is not threading.main_thread()
    if elsewhere or not callable(former) or isinstance(former, _Deferral):
        yield  # ignored, or a handler that was not installed from Python, or deferred already
        return
    defer = _Deferral(former)
    try:
        signal.signal(signal.SIGINT, defer)
        yield
    finally:
        signal.signal(signal.SIGINT, former)
        if defer.deferred:
            signal.raise_signal(signal.SIGINT)

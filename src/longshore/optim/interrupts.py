"""Ctrl-C that waits until a state is whole."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Take a first Ctrl-C (SIGINT) at the end of the block, and a second one at once.

    Python handles signals in the main thread alone, so in another one there is nothing to defer.
    """
    former = signal.getsignal(signal.SIGINT)
    if not callable(former) or threading.current_thread() is not threading.main_thread():
        yield  # ignored, or a handler that was not installed from Python
        return
    deferred = False

    def defer(*_: object) -> None:
        nonlocal deferred
        deferred = True
        signal.signal(signal.SIGINT, former)

    try:
        signal.signal(signal.SIGINT, defer)
        yield
    finally:
        signal.signal(signal.SIGINT, former)
        if deferred:
            signal.raise_signal(signal.SIGINT)

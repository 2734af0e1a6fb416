"""Collectives that may not end before the process does: waiting for them, and closing their groups."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from longshore.transfer.runner import exiting, park_until

_SLICE = timedelta(milliseconds=200)
_GRACE_S = 1.0
_LEFT: list[tuple[Any, Any]] = []
"""Groups, with the tensors that they use, each with its last collective."""
_LOCK = threading.Lock()


def wait_for(work: Any, unless: threading.Event | None = None, gone: Callable[[], Sequence[int]] = tuple) -> None:
    """Wait for a collective of gloo, for as long as the group's own timeout allows; raise its error. Once ``unless`` is
    set, do not wait for it.

    ``gone`` returns the ranks that are missing. A collective that is not done a little later never will be: gloo does
    not tell the ranks that exchange nothing with those directly, nor of a network that is cut.

    A thread in ``work.wait()`` must not come back from it while Python shuts down: see ``longshore.transfer.runner``.
    So it comes back now and then, and once the process is about to end, it waits in Python, and goes on only if another
    thread waits for its job.
    """
    until = math.inf
    while not (exiting.is_set() or work.is_completed()):
        if unless is not None and unless.is_set():
            return
        if time.monotonic() > until:
            let_go((), work)
            raise ConnectionError("another rank does not answer")
        try:
            work.wait(_SLICE)
            return
        except RuntimeError:
            if work.is_completed():
                break  # this raises its own error below
            if until == math.inf and gone():
                until = time.monotonic() + _GRACE_S
    if exiting.is_set():
        park_until(work.is_completed)  # which keeps the interpreter's lock
    work.wait()


def let_go(group: tuple[Any, ...], latest: Any) -> None:
    """Drop the last references to a group and its tensors, as soon as that takes no time.

    Dropping it waits for its ``latest`` collective, until the group's timeout if no other rank comes. A thread for that
    would end the process with SIGABRT if the collective ended while Python shuts down. So the group is dropped when
    this is called again after the collective has ended, and at the end of the process not at all: the references that
    are counted here outlive Python.
    """
    with _LOCK:
        done = [entry for entry in _LEFT if entry[1].is_completed()]
        _LEFT[:] = [entry for entry in _LEFT if not entry[1].is_completed()]
        if latest is not None and not latest.is_completed():
            _LEFT.append((group, latest))
            for each in (group, latest):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    for entry in done:
        for each in entry:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(each))

"""Process groups that were closed while a collective of theirs was under way."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

_LEFT: list[tuple[Any, Any]] = []
"""Groups, with the tensors that they use, each with its last collective."""
_LOCK = threading.Lock()


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

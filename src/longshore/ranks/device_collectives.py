"""Collectives of an accelerator under way: they are ended where another rank has ended, since they never would."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from longshore.accelerator import WaitingStream
from longshore.errors import RankError
from longshore.ranks.presence import ADVICE, presence, words
from longshore.ranks.waiting import abort, missing

_LOOK_S = 0.25
_GRACE_S = 2.0
"""How long a collective may still go on when another rank has ended, which may have done its part before."""

_LOGGER = logging.getLogger("longshore")


class WatchedWork(dist.Work):
    """Handle of a device's collective that is watched until it ends. A backend's own handle keeps tensors, so it is not
    kept for that."""

    def __init__(self, work: Any, beside: WaitingStream) -> None:
        super().__init__()
        self._work = work
        self._beside = beside
        self._after: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream wait; the host goes on."""
        work = self._work
        if work is None:
            self._beside.let_current_wait(self._after)
            return True
        work.wait()
        self._after = self._beside.after(work.wait)
        self._work = None
        return True

    def is_completed(self) -> bool:
        """Return whether the collective has ended; any thread may ask."""
        work, after = self._work, self._after  # in this order
        if after is not None:
            return after.query()
        assert work is not None
        return bool(work.is_completed())


@dataclass(eq=False)
class _UnderWay:
    """The latest collective of a group.

    Attributes:
        work: its handle.
        device: of its tensors.
        ranks: those of the group, by their numbers in the default process group.
        thread: a thread that goes on with its result, without another meeting in between; None: there is no such
            thread.
        hopeless_since: when a rank was first seen to have ended.
    """

    work: WatchedWork
    device: torch.device
    ranks: Sequence[int]
    thread: int | None
    hopeless_since: float | None = None


class DeviceCollectives:
    """Ends collectives that wait for a rank that has ended.

    The host does not wait for a device's collective, but for whatever comes after it on the device, where it cannot be
    told of anything. So a thread looks after them.

    Attributes:
        gone: the ranks for which collectives were ended, in words; the results of these are not valid.
    """

    def __init__(self) -> None:
        self.gone = ""
        self._under_way: dict[Any, _UnderWay] = {}
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._beside: dict[torch.device, WaitingStream] = {}

    def began(
        self, group: Any, work: Any, device: torch.device, ranks: Sequence[int], raises: bool = False
    ) -> WatchedWork:
        """Note a collective of ``group``, which has these ``ranks``, and return its handle. ``raises``: whether the
        current thread goes on with its result without another meeting, so that it gets a RankError if the collective is
        ended."""
        self.check()
        if device not in self._beside:
            self._beside[device] = WaitingStream(device)
        watched = WatchedWork(work, self._beside[device])
        self._under_way[group] = _UnderWay(watched, device, ranks, threading.get_ident() if raises else None)
        if self._thread is None:
            arguments = (weakref.ref(self), self._closing)
            self._thread = threading.Thread(target=_look, args=arguments, name="longshore-device-watch", daemon=True)
            self._thread.start()
        return watched

    def check(self) -> None:
        """Raise RankError if a collective was ended."""
        if self.gone:
            raise RankError(f"{self.gone} while a collective was under way; {ADVICE}")

    def abort_stalled(self) -> None:
        """End each collective that waits for a rank that has ended."""
        for group, each in list(self._under_way.items()):
            if each.work.is_completed():
                continue
            gone = missing(each.ranks)
            each.hopeless_since = (each.hopeless_since or time.monotonic()) if gone else None
            if each.hopeless_since is None or time.monotonic() - each.hopeless_since < _GRACE_S:
                continue
            self.gone = words(gone)
            if (here := presence()) is not None:
                here.leave(gone)
            del self._under_way[group]
            try:
                abort(group, each.device)
            except RuntimeError as error:
                _LOGGER.error(f"a collective on {each.device} waits for a missing rank, and cannot be ended: {error}")
            if each.thread is not None:
                try:
                    self.check()
                except RankError as error:
                    _raise_in(each.thread, error)

    def close(self) -> None:
        self._closing.set()
        self._under_way.clear()  # references keep sockets open


def _look(collectives: weakref.ref[DeviceCollectives], closing: threading.Event) -> None:
    while not closing.wait(_LOOK_S):
        found = collectives()
        if found is None:
            return
        found.abort_stalled()
        del found


def _raise_in(thread: int, error: RankError) -> None:
    """Raise an error in another thread, as soon as it is in Python."""

    def init(self: RankError) -> None:
        RankError.__init__(self, *error.args)

    # The interpreter takes a class, and makes the exception itself.
    kind = type("RankError", (RankError,), {"__init__": init, "__module__": RankError.__module__})
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))

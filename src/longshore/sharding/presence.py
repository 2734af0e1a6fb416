"""Which ranks are still there: each says so, again and again, in the store by which they met.

A collective of gloo fails when a rank that it waits for ends. Where that rank stopped, or the network between them was
cut, it waits for the timeout of its group, and one of an accelerator's backend for ever; none says which rank that is.
So a thread of each rank counts in the store, and reads there, while somebody waits, what the others say.
"""

from __future__ import annotations

import atexit
import os
import pickle
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from longshore.errors import RankError

T = TypeVar("T")

_BEAT_S = 0.5
_SILENT_S = 20.0
"""How long a rank is silent before it counts as missing: native code may hold its interpreter for a while."""
_ENDED_S = 4.0
"""The same for a rank that said that it ends, and for all once a connection broke: then one of them has ended."""
_POLL_S, _MOST_POLL_S = 0.01, 0.2
_LAST_WORDS_S = 2.0
_KEYS = "longshore/presence"
_ENDED, _LEFT = "ended", "left"
LAUNCHER = -1
"""Stands for the process of the launcher that keeps the store."""

ADVICE = "look at the first error of any rank, and start again from a checkpoint"


@dataclass
class _Heard:
    """The latest that another rank wrote: how often it has written, and what it said; and for how long that is so."""

    count: str
    said: Sequence[str] = ()
    silent_s: float = 0.0

    def is_missing(self, broken: bool) -> bool:
        if _ENDED in self.said:
            return broken or self.silent_s >= _ENDED_S
        return self.silent_s >= (_ENDED_S if broken else _SILENT_S)


@dataclass(eq=False)
class _Gathering:
    """Values that all ranks tell each other: where they put them, and this rank's until it is there."""

    keys: list[str]
    own: bytes | None
    names: bool = False
    """Whether time is over, and those who did not come are asked for."""
    absent: Sequence[int] = ()
    found: Sequence[bytes] = ()
    over: threading.Event = field(default_factory=threading.Event)


class Presence:
    """A thread that tells the other ranks of the default process group that this one is there, and hears of them.

    Times are counted while this rank runs, and the clocks of two ranks are never compared: one that was stopped does
    not take the others for silent. Only the thread speaks to the store, and may wait for it for ever.

    Args:
        store: that of the default process group; the thread ends with it.
        number: how many there have been in this process. A store may serve several default process groups, one after
            the other, and what was said in one of them must not be heard in the next.
    """

    def __init__(self, store: Any, rank: int, world_size: int, number: int = 1) -> None:
        self.store = weakref.ref(store)
        self.rank, self.world_size = rank, world_size
        self._keys = f"{_KEYS}/{number}"
        self._keeper = LAUNCHER if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
        self._lock = threading.Lock()
        self._heard: dict[int, _Heard] = {}
        self._gatherings: list[_Gathering] = []
        self._gathered: dict[str, int] = {}
        self._said = ""
        self._count = 0
        self._asked_at = self._heard_at = time.monotonic()
        self._store = _Heard("")
        """The store itself; it said that it ended if an exchange with it failed."""
        self._wake = threading.Event()
        self.ends = False
        self._thread = threading.Thread(target=_run, args=(weakref.ref(self), self._wake), daemon=True)
        self._thread.name = "longshore-presence"
        self._thread.start()

    # -- who is missing -------------------------------------------------------

    def missing(self, among: Sequence[int], broken: bool = False) -> list[int]:
        """Return the ranks for which ``among`` these ones some wait in vain: they have ended, or do not answer.

        Where one of them gave up because of another rank, that other one is named.

        Args:
            among: ranks by their numbers in the default process group, as those that are returned.
            broken: whether a connection to one of them broke.
        """
        with self._lock:
            self._store.silent_s += self._passed("_asked_at")
            left = {rank: set(map(int, each.said[1:])) for rank, each in self._heard.items() if _LEFT in each.said}
            named = set[int]().union(*left.values())
            gone = named | {rank for rank, each in self._heard.items() if rank not in left and each.is_missing(broken)}
            found = gone.intersection(among).union(*(left[rank] for rank in among if rank in left))
            concerned = self._keeper == LAUNCHER or self._keeper in among
            if not found and self._store.silent_s >= (0.0 if concerned else _SILENT_S):
                found = {self._keeper} if self._store.is_missing(broken and concerned) else found
            return sorted(found)

    def _passed(self, since: str) -> float:
        """Return the seconds since the last such call, few if this process was stopped in between."""
        now = time.monotonic()
        passed_s = min(now - getattr(self, since), 2 * _BEAT_S)
        setattr(self, since, now)
        return passed_s

    def who_broke(self, among: Sequence[int]) -> list[int]:
        """Return what :meth:`missing` does, after a connection broke, once that is any rank; none if nobody is missing.
        The others hear that this rank gives up because of it."""
        until = time.monotonic() + _ENDED_S + 3 * _BEAT_S
        while not (found := self.missing(among, broken=True)) and time.monotonic() < until:
            time.sleep(_POLL_S)
        with self._lock:
            if not found and self._heard:  # it may have ended before it said anything
                found = [rank for rank in among if rank != self.rank and rank not in self._heard]
        self.leave(found)
        return found

    def leave(self, because: Sequence[int]) -> None:
        """Say that this rank gives up because these are missing."""
        if not because or self._said:
            return
        self._said = " ".join([_LEFT, *map(str, because)])
        self._wake.set()
        until = time.monotonic() + _LAST_WORDS_S
        # This process may end now, and the store with it, in which the others read why.
        while self._keeper == self.rank and not self._others_know and time.monotonic() < until:
            time.sleep(_POLL_S)

    # -- values ---------------------------------------------------------------

    def gather(self, what: str, value: T, timeout_s: float) -> list[T]:
        """Return the value of each rank, by rank. All ranks call this alike; it is for small values and few calls.

        Args:
            what: what the ranks do, for messages; calls for different things do not disturb each other.

        Raises:
            RankError: a rank is missing, or did not come in time.
        """
        with self._lock:
            times = self._gathered[what] = self._gathered.get(what, 0) + 1
            keys = [f"{self._keys}/{what}/{times}/{rank}" for rank in range(self.world_size)]
            each = _Gathering(keys, pickle.dumps(value))
            self._gatherings.append(each)
        self._wake.set()
        until = time.monotonic() + timeout_s
        try:
            while not each.over.wait(_MOST_POLL_S):
                if found := self.missing(range(self.world_size)):
                    self.leave(found)
                    raise RankError(f"rank {self.rank}: {what}: {words(found)}; {ADVICE}")
                if time.monotonic() > until and not each.names:
                    each.names, until = True, until + _LAST_WORDS_S
                    self._wake.set()
                elif time.monotonic() > until:
                    break
        finally:
            with self._lock:
                self._gatherings.remove(each)
        if not each.found:
            who = f"rank {', '.join(map(str, each.absent))} did not come" if each.absent else "others did not come"
            raise RankError(
                f"rank {self.rank}: {what}: {who} within {timeout_s:g} s; all ranks have to make the same calls"
            )
        return [pickle.loads(theirs) for theirs in each.found]

    # -- on the thread --------------------------------------------------------

    def exchange(self, store: Any, ends: bool) -> bool:
        """Speak to the other ranks, and hear them if somebody waits; return whether to look again soon."""
        self._count += 1
        store.set(f"{self._keys}/{self.rank}", f"{self._count} {self._said or (_ENDED if ends else '')}")
        if time.monotonic() - self._asked_at < 4 * _BEAT_S:
            self._hear(store)
        with self._lock:
            waiting = list(self._gatherings)
        for each in waiting:
            self._gather(store, each)
        self._store.silent_s = 0.0
        return any(not each.over.is_set() for each in waiting)

    def _hear(self, store: Any) -> None:
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        known = [rank for rank in others if rank in self._heard or store.check([f"{self._keys}/{rank}"])]
        said = store.multi_get([f"{self._keys}/{rank}" for rank in known]) if known else []
        with self._lock:
            passed_s = self._passed("_heard_at")
            for rank, theirs in zip(known, said, strict=True):
                count, *now = bytes(theirs).decode().split()
                before = self._heard.get(rank)
                silent_s = before.silent_s + passed_s if before is not None and before.count == count else 0.0
                self._heard[rank] = _Heard(count, now, silent_s)

    def _gather(self, store: Any, each: _Gathering) -> None:
        if each.own is not None:
            store.set(each.keys[self.rank], each.own)
            each.own = None
        if store.check(each.keys):
            each.found = [bytes(value) for value in store.multi_get(each.keys)]
        elif each.names:
            each.absent = [rank for rank, key in enumerate(each.keys) if not store.check([key])]
        else:
            return
        each.over.set()

    def failed(self) -> None:
        """Note that the store does not answer any more."""
        self._store.said = [_ENDED]

    @property
    def _others_know(self) -> bool:
        with self._lock:
            return all(each.said or each.is_missing(True) for each in self._heard.values())

    def close(self) -> None:
        """Say that this rank ends, and end the thread."""
        self.ends = True
        self._wake.set()
        self._thread.join(_LAST_WORDS_S)


def _run(presence: weakref.ref[Presence], wake: threading.Event) -> None:
    store, pause_s = None, _POLL_S
    while (found := presence()) is not None:
        given = found.store()
        ends = given is None or found.ends
        try:
            if store is None and given is not None:
                store = given.clone()  # a connection of its own: calls of other threads may hold the other one
            busy = store is not None and found.exchange(store, ends)
        except Exception:  # torch's own, of several types
            found.failed()
            return
        if ends:
            return
        del found, given
        pause_s = min(2 * pause_s, _MOST_POLL_S) if busy else _BEAT_S
        if wake.wait(pause_s):
            pause_s = _POLL_S
        wake.clear()


def words(ranks: Sequence[int]) -> str:
    """Return who is missing, for messages; none of ``ranks``: it is not known who."""
    if not ranks:
        return "another rank has probably ended"
    if dist.is_initialized() and list(ranks) == [dist.get_rank()]:
        return f"the others took this rank for missing: it did not answer them for {_SILENT_S:g} s"
    if LAUNCHER in ranks:
        return "the launcher's store, by which the ranks met, has ended or cannot be reached"
    named = ", ".join(map(str, ranks))
    return f"{f'rank {named} has' if len(ranks) == 1 else f'ranks {named} have'} ended or cannot be reached"


_current: Presence | None = None
_number = 0
_making = threading.Lock()


def presence() -> Presence | None:
    """Return that of the default process group; None if there is no such group, or it has one rank."""
    global _current, _number
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store = dist.distributed_c10d._get_default_store()
    with _making:
        if _current is None or _current.store() is not store:
            _number += 1
            _current = Presence(store, dist.get_rank(), dist.get_world_size(), _number)
        return _current


def _close() -> None:
    if _current is not None:
        _current.close()


def _after_fork() -> None:
    """Forget what belongs to another process, whose thread is not in this one (of a data loader)."""
    global _current, _making
    _current, _making = None, threading.Lock()


atexit.register(_close)
os.register_at_fork(after_in_child=_after_fork)

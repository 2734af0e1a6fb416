"""Which ranks are still there: each says so, again and again, in the store by which they met.

A collective of gloo fails when a rank that it waits for ends. Where that rank stopped, or the network between them was
cut, it waits for the timeout of its group, and one of an accelerator's backend for ever; none says which rank that is.
So a thread of each rank counts in the store, and reads there, while a rank waits, the counts of the others.

A rank that has never said anything may be slow to reach its first call of longshore, so it is no missing one: those who
wait for it do so for the timeout of the group. So each begins to speak as early as it can; see :func:`presence`.
"""

from __future__ import annotations

import atexit
import logging
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
from longshore.ranks import on_made

T = TypeVar("T")

_BEAT_S = 0.5
_SILENT_S = 20.0
"""How long a rank is silent before it counts as missing: native code may hold its interpreter for a while."""
_ENDED_S = 4.0
"""The same for a rank that said that it ends, and for all once a connection broke: then one of them has ended."""
_POLL_S, _MOST_POLL_S = 0.01, 0.2
_LAST_WORDS_S = 2.0
_KEYS = "longshore/presence"
_ENDED, _LEFT, _PARTED = "ended", "left", "parted"
"""The last: of a rank that says no more, since the process that keeps the store ends."""

_LOGGER = logging.getLogger("longshore")
LAUNCHER = -1
"""Stands for the process of the launcher that keeps the store."""

ADVICE = "look at the first error of any rank, and start again from a checkpoint"


@dataclass
class _Heard:
    """The latest that another rank wrote: how often it has written, and its words; and for how long that is so."""

    count: str
    said: Sequence[str] = ()
    silent_s: float = 0.0

    @property
    def because(self) -> set[int]:
        """The ranks because of which it gave up."""
        return {int(word) for word in self.said if word.isdigit()}

    def is_missing(self, broken: bool) -> bool:
        if _ENDED in self.said:
            return broken or self.silent_s >= _ENDED_S
        return self.silent_s >= (_ENDED_S if broken else _SILENT_S)


@dataclass(eq=False)
class _Gathering:
    """Values that all ranks tell each other: where they put them, and this rank's until it is there."""

    what: str
    own: bytes | None
    names: bool = False
    """Whether those who did not come are asked for."""
    absent: Sequence[int] = ()
    named: threading.Event = field(default_factory=threading.Event)
    found: Sequence[bytes] = ()
    over: threading.Event = field(default_factory=threading.Event)


class Presence:
    """A thread that tells the other ranks of the default process group that this one is there, and hears of them.

    Times are counted while this rank runs, and the clocks of two ranks are never compared: one that was stopped does
    not take the others for silent. Only the thread speaks to the store, and may wait for it for ever.

    Args:
        store: that of the default process group; the thread ends with it.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.store = weakref.ref(store)
        self.rank, self.world_size = rank, world_size
        self._keys = ""
        self._keeper = LAUNCHER if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
        self._parts = self._keeper == 0 and not _is_file(store)
        """Whether the store ends with that rank's process."""
        self._lock = threading.Lock()
        self._heard: dict[int, _Heard] = {}
        self._gatherings: list[_Gathering] = []
        self._gathered: dict[str, int] = {}
        self._said = ""
        self._count = 0
        self._asked_at = self._heard_at = time.monotonic()
        self._store = _Heard("")
        """The store itself; it said that it ended if an exchange with it failed."""
        self._listened = self._keeper_spoke = False
        self._wake = threading.Event()
        self.spoke = threading.Event()
        """Set once the others can hear of this rank, or the store has failed."""
        self.ends = False
        self._kept: Any = None
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
            left = {rank: each.because for rank, each in self._heard.items() if _LEFT in each.said}
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
        """Return what :meth:`missing` does, after a connection broke, once that is any rank; none if no rank is
        missing. The others hear that this rank gives up because of it."""
        until = time.monotonic() + _ENDED_S + 3 * _BEAT_S
        while not (found := self.missing(among, broken=True)) and time.monotonic() < until:
            time.sleep(_POLL_S)
        with self._lock:
            unheard = [rank for rank in among if rank != self.rank and rank not in self._heard]
            if not found and (self._heard or (self._listened and len(unheard) == 1)):
                found = unheard  # it may have ended before it said anything
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

    def gather(self, what: str, value: T, timeout_s: float, notice_s: float = 30.0, doing: str = "") -> list[T]:
        """Return the value of each rank, by rank. All ranks call this alike; it is for small values and few calls.

        Args:
            what: the action of the ranks, for messages; calls for different things do not disturb each other.
            timeout_s: how long this rank waits for the others.
            notice_s: how long it waits before it logs a warning.
            doing: the same as ``what``, for messages of this rank alone.

        Raises:
            RankError: a rank is missing, or did not come in time.
        """
        with self._lock:
            times = self._gathered[what] = self._gathered.get(what, 0) + 1
            each = _Gathering(f"{what}/{times}", pickle.dumps(value))
            self._gatherings.append(each)
        self._wake.set()
        doing = doing or what
        since = time.monotonic()
        try:
            while not each.over.wait(_MOST_POLL_S):
                if found := self.missing(range(self.world_size)):
                    self.leave(found)
                    raise RankError(f"rank {self.rank}: {doing}: {words(found)}; {ADVICE}")
                if (waited_s := time.monotonic() - since) > timeout_s:
                    who = self._absent_from(each)
                    if each.over.is_set():
                        break
                    raise RankError(
                        f"rank {self.rank}: {doing}: {who} did not come within {timeout_s:g} s; all ranks have to make "
                        "the same calls"
                    )
                if waited_s > notice_s:
                    notice_s = timeout_s
                    _LOGGER.warning(
                        f"rank {self.rank} has waited {waited_s:.0f} s: {doing}: {self._absent_from(each)} did not "
                        "come yet; all ranks have to make the same calls"
                    )
        finally:
            with self._lock:
                self._gatherings.remove(each)
        return [pickle.loads(theirs) for theirs in each.found]

    def _absent_from(self, each: _Gathering) -> str:
        """Return who did not come, for messages."""
        each.named.clear()
        each.names = True
        self._wake.set()
        each.named.wait(_LAST_WORDS_S)
        if not each.absent:
            return "another rank"
        with self._lock:
            silent = [rank for rank in each.absent if rank != self.rank and rank not in self._heard]
        who = f"rank {_listed(each.absent)}"
        if silent:
            said = "which" if silent == each.absent else f"of which {_listed(silent)}"
            who += f", {said} made no call of longshore in this process group, or stopped before it,"
        return who

    # -- on the thread --------------------------------------------------------

    def exchange(self, store: Any, ends: bool) -> bool:
        """Speak to the other ranks, and hear them if a call waits; return whether to look again soon."""
        if not self._keys:
            self._keys = self._free_keys(store)
        self._count += 1
        store.set(f"{self._keys}/{self.rank}", f"{self._count} {self._said} {_ENDED if ends else ''}")
        self.spoke.set()
        if ends or time.monotonic() - self._asked_at < 4 * _BEAT_S:
            self._hear(store)
        waiting = self._gather_all(store)
        self._store.silent_s = 0.0
        return ends or any(not each.over.is_set() for each in waiting)

    def _gather_all(self, store: Any) -> list[_Gathering]:
        with self._lock:
            waiting = list(self._gatherings)
        for each in waiting:
            self._gather(store, each)
        return waiting

    def _free_keys(self, store: Any) -> str:
        """Return where this rank has said nothing yet. A store may serve several default process groups, one after the
        other, and words of one of them must not be heard in the next."""
        number = 1
        while store.check([f"{_KEYS}/{number}/{self.rank}"]):
            number += 1
        return f"{_KEYS}/{number}"

    def _hear(self, store: Any) -> None:
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        known = [rank for rank in others if rank in self._heard or store.check([f"{self._keys}/{rank}"])]
        said = store.multi_get([f"{self._keys}/{rank}" for rank in known]) if known else []
        with self._lock:
            self._listened = True
            passed_s = self._passed("_heard_at")
            for rank, theirs in zip(known, said, strict=True):
                count, *now = bytes(theirs).decode().split()
                before = self._heard.get(rank)
                silent_s = before.silent_s + passed_s if before is not None and before.count == count else 0.0
                self._heard[rank] = _Heard(count, now, silent_s)

    def parts(self, store: Any) -> bool:
        """Return whether the process that keeps the store is about to end, and tell it that this rank says no more.

        Who speaks to a store that has ended makes torch print a trace of calls for each time.
        """
        key = f"{self._keys}/{self._keeper}"
        if not self._parts or self._keeper == self.rank:
            return False
        self._keeper_spoke = self._keeper_spoke or store.check([key])
        if not self._keeper_spoke:
            return False
        if _ENDED not in bytes(store.multi_get([key])[0]).decode().split():
            return False
        self._hear(store)  # why it ends
        self._gather_all(store)  # the last values may have come just now
        self._count += 1
        store.set(f"{self._keys}/{self.rank}", f"{self._count} {self._said or _PARTED}")
        return True

    @property
    def may_end(self) -> bool:
        """Whether no other rank speaks to the store that this process keeps, once it says that it ends."""
        with self._lock:
            others = list(self._heard.values())
        return (
            not self._parts or self._keeper != self.rank or all(each.said or each.is_missing(True) for each in others)
        )

    def _gather(self, store: Any, each: _Gathering) -> None:
        keys = [f"{self._keys}/{each.what}/{rank}" for rank in range(self.world_size)]
        if each.own is not None:
            store.set(keys[self.rank], each.own)
            each.own = None
        if store.check(keys):
            each.found = [bytes(value) for value in store.multi_get(keys)]
            each.over.set()
        elif each.names and not each.named.is_set():
            each.absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        else:
            return
        each.named.set()

    def failed(self) -> None:
        """Note that the store does not answer any more."""
        self._store.said = [_ENDED]
        self.spoke.set()

    @property
    def _others_know(self) -> bool:
        with self._lock:
            return all(each.said or each.is_missing(True) for each in self._heard.values())

    def leave_group(self) -> None:
        """Say that this rank ends, before it destroys a process group whose store stays until the process ends."""
        if not self._parts or self._keeper != self.rank:
            self.close()
            return
        self._kept, self._said = self.store(), self._said or _ENDED  # close() tells the others when the store ends
        self._wake.set()

    def close(self) -> None:
        """Say that this rank ends, and end the thread."""
        self.ends = True
        self._wake.set()
        self._thread.join(_LAST_WORDS_S)


def _is_file(store: Any) -> bool:
    from torch._C._distributed_c10d import FileStore, PrefixStore  # a torch that is built for one process has neither

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, FileStore)


def _run(presence: weakref.ref[Presence], wake: threading.Event) -> None:
    store, pause_s = None, _POLL_S
    while (found := presence()) is not None:
        given, ends = found.store(), found.ends
        if given is None:
            return  # the store may have ended with it, and who speaks to it then makes torch print a trace
        try:
            if store is None:
                store = given.clone()  # a connection of its own: calls of other threads may hold the other one
            busy = found.exchange(store, ends)
            if not ends and found.parts(store):
                found.failed()
                return
        except Exception:  # torch's own, of several types
            found.failed()
            return
        if ends and found.may_end:
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
    named = _listed(ranks)
    return f"{f'rank {named} has' if len(ranks) == 1 else f'ranks {named} have'} ended or cannot be reached"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


_current: Presence | None = None
_making = threading.Lock()
_of_parent: Any = None
"""The store of the process that forked this one, in which this one must not speak as that one's rank."""


def presence() -> Presence | None:
    """Return that of the default process group; None if there is no such group, it has one rank, or it is that of the
    process that forked this one.

    From the first call on the others hear of this rank. Whatever comes first (an optimizer, an engine, a save, a load)
    calls this, and not all ranks have to.
    """
    global _current
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store = dist.distributed_c10d._get_default_store()
    if store is None or store is _of_parent:  # the former as with MPI's backend
        return None
    made = None
    with _making:
        if _current is None or _current.store() is not store:
            _current = made = Presence(store, dist.get_rank(), dist.get_world_size())
        found = _current
    if made is not None:
        made.spoke.wait(_LAST_WORDS_S)
    return found


def _close() -> None:
    if _current is not None:
        _current.close()


def _after_fork() -> None:
    """Forget the state of another process, whose thread is not in this one (of a data loader)."""
    global _current, _making, _of_parent
    _current, _making = None, threading.Lock()
    if dist.is_available() and dist.is_initialized():
        _of_parent = dist.distributed_c10d._get_default_store()


atexit.register(_close)
on_made.append(presence)  # the others may wait for this rank long before its first save

os.register_at_fork(after_in_child=_after_fork)

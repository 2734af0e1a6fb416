"""The ranks of one start find each other in the store that all of them reach, and make the default process group."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

_POLL_S, _MOST_POLL_S = 0.005, 0.1

_stores: dict[tuple[str, int, int], Store] = {}
"""For each address and rank the store. It stays until the process ends: rank 0 could not open its port again while
others still leave."""


def store_at(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return the store that torchrun, or otherwise rank 0, has at this address."""
    key = f"{host}:{port}", rank, world_size
    if key not in _stores:
        # torchrun says so, as torch's own rendezvous reads it. Rank 0 need not wait: it finds out below who is missing.
        hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        _stores[key] = TCPStore(
            host, port, world_size, is_master=hosts, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
    _stores[key].set_timeout(timeout)
    return _stores[key]


def forget_stores() -> None:
    """Connect anew the next time."""
    _stores.clear()


class Start:
    """One start of all ranks, each with a name of its own that it draws.

    The store may have seen others: a process that joins again, or torchrun, which starts all ranks again in the store
    of those that failed (and counts its restarts differently on each host). So rank 0 says by which names it knows the
    ranks, and each confirms the names in which its own is: all of these belong to one start.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._until = time.monotonic() + timeout.total_seconds()
        self._own = secrets.token_hex(8)

    def meet(self) -> Store:
        """Wait for all ranks, and return a part of the store that only they use. Raises TimeoutError."""
        own = PrefixStore("longshore/start", self._store)
        own.set(f"name/{self._rank}", self._own)
        names = [""] * self._world_size

        def all_confirmed() -> bool:
            nonlocal names
            if self._rank == 0:
                now = [_read(own, f"name/{rank}") for rank in range(self._world_size)]
                if now != names:
                    own.set("names", json.dumps(now))
                names = now
            else:
                names = json.loads(_read(own, "names") or "[]") or names
            if names[self._rank] != self._own:
                return False
            own.set(f"{names[0]}/{self._rank}", self._own)
            if self._rank == 0 and not missing():
                own.set(f"{names[0]}/all", "")
            return own.check([f"{names[0]}/all"])

        def missing() -> list[int]:
            if names[self._rank] != self._own:
                return [0]
            return [rank for rank, name in enumerate(names) if not name or _read(own, f"{names[0]}/{rank}") != name]

        self._wait(all_confirmed, missing, "did not come")
        return PrefixStore(f"longshore/{names[0]}", self._store)

    def connect(self, store: Store, make: Callable[[], Any]) -> None:
        """Make the process group in the store that :meth:`meet` returned; raise the error of any rank.

        Some ranks may reach each other and others not, and gloo waits for each of them in turn. So this waits beside
        it, for the time that is left. Gloo connects its ranks when a group is made: one that is done first, and that
        ends with an error at once, would break the connection that another is still making.
        """
        failures: list[Exception] = []
        over = threading.Event()

        def run() -> None:
            try:
                make()
            except Exception as error:
                failures.append(error)
            over.set()

        threading.Thread(target=run, name="longshore-rendezvous", daemon=True).start()
        self._wait(over.is_set, lambda: self._without(store, "connected"), "could not be connected", store)
        if failures:
            store.set(f"failed/{self._rank}", str(failures[0]).splitlines()[0])
            store.set("failed", str(self._rank))
            raise failures[0]
        store.set(f"connected/{self._rank}", "")
        everyone = [f"connected/{rank}" for rank in range(self._world_size)]
        self._wait(
            lambda: store.check(everyone), lambda: self._without(store, "connected"), "could not be connected", store
        )

    def _without(self, store: Store, key: str) -> list[int]:
        others = (rank for rank in range(self._world_size) if rank != self._rank)
        return [rank for rank in others if not store.check([f"{key}/{rank}"])]

    def _wait(
        self, true: Callable[[], bool], missing: Callable[[], list[int]], what: str, store: Store | None = None
    ) -> None:
        pause_s = _POLL_S
        while not true():
            if store is not None and (failed := _read(store, "failed")):
                raise ConnectionError(f"rank {failed} could not connect ({_read(store, f'failed/{failed}')})")
            if time.monotonic() > self._until:
                raise TimeoutError(f"rank {', '.join(map(str, missing())) or 'that has a part'} {what}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_POLL_S)


def _read(store: Store, key: str) -> str:
    return bytes(store.get(key)).decode() if store.check([key]) else ""

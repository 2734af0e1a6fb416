"""Which ranks are still there: each is told which other one's process has ended.

A collective of gloo fails when a rank that it waits for ends, one of an accelerator's backend may wait for ever, and
neither says which rank that was. So every two ranks keep a connection on which nothing is sent, and which the operating
system closes when a process ends, however it does.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_CONNECT_S = 5.0
"""How long the ranks try to connect; after that some are not watched."""
_KEY_BYTES = 32
_ADDRESS_BYTES = 256
_ACCEPTED, _LEAVING = b"+", b"-"
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""Seconds, seconds and count of probes, after which the connection to a machine without power or network is closed."""
_LOOK_S = 0.01
_LOGGER = logging.getLogger("longshore")


@dataclass(eq=False)
class _Peer:
    """Connection to one other rank; it is ``accepted`` once that rank knows of it, too."""

    connection: socket.socket
    accepted: bool


class Presence:
    """A connection to each of the other ranks, to be looked at by whoever waits for them.

    Where ranks cannot connect (there may be a firewall), the end of these is not seen, and they go on.

    Args:
        ranks: all ranks, by their numbers in the default process group.
        place: this rank's place among them.
        rows: returns every rank's tensor, stacked; see :meth:`CollectiveThread.rows`. All ranks make this object at the
            same time.
    """

    def __init__(self, ranks: Sequence[int], place: int, rows: Callable[[Tensor], Tensor]) -> None:
        self._ranks = ranks
        self._lock = threading.Lock()
        self._gone: set[int] = set()
        self._peers: dict[int, _Peer] = {}
        # Also when this object is dropped: then this rank is there, and waits no more.
        self.close = weakref.finalize(self, _leave, self._peers)
        """Tell the other ranks that this one goes on without them, and close the connections."""
        self.close.atexit = False
        _all.add(self)
        if len(ranks) > 1:
            self._connect(place, rows)

    def gone(self, among: Sequence[int]) -> list[int]:
        """Return the places of those ``among`` these ranks whose processes have ended."""
        with self._lock:
            for rank, peer in list(self._peers.items()):
                said = _received(peer.connection)
                if said is None:
                    continue
                peer.accepted = peer.accepted or _ACCEPTED in said
                if said == b"" or _LEAVING in said:
                    del self._peers[rank]
                    peer.connection.close()
                    if said == b"" and peer.accepted:
                        self._gone.add(rank)
            return [place for place, rank in enumerate(among) if rank in self._gone]

    def gone_within(self, patience_s: float, among: Sequence[int]) -> list[int]:
        """Return what :meth:`gone` does, once that is any rank; none if it is still none after so many seconds."""
        until = time.monotonic() + patience_s
        while not (found := self.gone(among)) and time.monotonic() < until and self._peers:
            time.sleep(_LOOK_S)
        return found

    # -- at the start ---------------------------------------------------------

    def _connect(self, own: int, rows: Callable[[Tensor], Tensor]) -> None:
        """Listen, connect to the ranks before this one, and accept those after it."""
        until = time.monotonic() + _CONNECT_S
        one_machine = len({bytes(row.tolist()) for row in rows(_padded(socket.gethostname().encode()))}) == 1
        with contextlib.ExitStack() as stack:
            listener, place = None, b""
            with contextlib.suppress(OSError):
                host = "127.0.0.1" if one_machine else _own_address()
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                listener = stack.enter_context(socket.create_server((host, 0), family=family, backlog=len(self._ranks)))
                place = f"{host} {listener.getsockname()[1]}".encode()
            said = rows(_padded(secrets.token_bytes(_KEY_BYTES) + place)).tolist()
            key = bytes(said[0][:_KEY_BYTES])
            for other in range(own):
                self._call(other, bytes(said[other][_KEY_BYTES:]).rstrip(b"\0").decode(), key + _number(own), until)
            if listener is not None:
                self._accept(listener, range(own + 1, len(self._ranks)), key, until)

    def _call(self, other: int, place: str, greeting: bytes, until: float) -> None:
        connection: socket.socket | None = None
        try:
            host, port = place.split(" ")
            connection = socket.create_connection((host, int(port)), timeout=_left(until))
            connection.sendall(greeting)
        except (OSError, ValueError) as error:
            if connection is not None:
                connection.close()
            _LOGGER.debug(f"the end of rank {other} would not be seen: no connection to {place or 'it'} ({error})")
            return
        self._keep(other, connection, accepted=False)

    def _accept(self, listener: socket.socket, others: Iterable[int], key: bytes, until: float) -> None:
        missing = set(others)
        try:
            while missing:
                listener.settimeout(_left(until))
                connection, _ = listener.accept()
                with contextlib.suppress(OSError):  # from something else than a rank
                    connection.settimeout(min(1.0, _left(until)))
                    greeting = _up_to(connection, _KEY_BYTES + len(_number(0)))
                    other = int.from_bytes(greeting[_KEY_BYTES:], "little")
                    if hmac.compare_digest(greeting[:_KEY_BYTES], key) and other in missing:
                        connection.sendall(_ACCEPTED)
                        missing.remove(other)
                        self._keep(other, connection, accepted=True)
                        continue
                connection.close()
        except OSError as error:
            _LOGGER.debug(f"the end of ranks {sorted(missing)} would not be seen: they did not connect ({error})")

    def _keep(self, other: int, connection: socket.socket, accepted: bool) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        connection.setblocking(False)
        self._peers[self._ranks[other]] = _Peer(connection, accepted)


def words(ranks: Sequence[int]) -> str:
    """Return who has ended, for messages; none of ``ranks``: it is not known who."""
    if not ranks:
        return "another rank has probably ended"
    named = ", ".join(map(str, ranks))
    return f"rank {named} has ended" if len(ranks) == 1 else f"ranks {named} have ended"


def _number(place: int) -> bytes:
    return place.to_bytes(8, "little")


def _padded(said: bytes) -> Tensor:
    return torch.tensor(list(said[:_ADDRESS_BYTES].ljust(_ADDRESS_BYTES, b"\0")), dtype=torch.uint8)


def _left(until: float) -> float:
    """Return the seconds that are left, as a timeout: above 0."""
    return max(_LOOK_S, until - time.monotonic())


def _own_address() -> str:
    """Return the address by which the other machines reach this one: that of the way to where the ranks met."""
    meeting = os.environ.get("MASTER_ADDR")
    if meeting:
        with contextlib.suppress(OSError):
            for family, kind, protocol, _, address in socket.getaddrinfo(meeting, 1, type=socket.SOCK_DGRAM):
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(address)  # nothing is sent
                    return str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())


def _up_to(connection: socket.socket, count: int) -> bytes:
    """Return the next ``count`` bytes, or what arrives before the connection ends."""
    said = b""
    while len(said) < count and (part := connection.recv(count - len(said))):
        said += part
    return said


def _received(connection: socket.socket) -> bytes | None:
    """Return what has arrived: None if nothing, and nothing at all if the connection has ended."""
    try:
        return connection.recv(16)
    except (BlockingIOError, InterruptedError):
        return None
    except OSError:
        return b""


def _leave(peers: dict[int, _Peer]) -> None:
    for peer in peers.values():
        with contextlib.suppress(OSError):
            peer.connection.send(_LEAVING)
        peer.connection.close()
    peers.clear()


_all: weakref.WeakSet[Presence] = weakref.WeakSet()


def _after_fork() -> None:
    """Close copies of connections in a forked process (of a data loader), which could outlive this one."""
    for presence in list(_all):
        for peer in presence._peers.values():
            peer.connection.close()  # says nothing to the other rank
        presence._peers.clear()


os.register_at_fork(after_in_child=_after_fork)

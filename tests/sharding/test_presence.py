"""Connections between ranks show which of them have ended, and nothing else is taken for that."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from longshore.sharding import presence as module
from longshore.sharding.presence import Presence, words

RANKS = [4, 7, 9]
"""Three ranks, by their numbers in a larger group."""


class Meetings:
    """What ranks that are threads tell each other."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count)
        self._said: list[Any] = [None] * count

    def rows(self, place: int, row: torch.Tensor) -> torch.Tensor:
        self._said[place] = row
        self._barrier.wait(20)
        found = torch.stack(self._said)
        self._barrier.wait(20)
        return found


def connected(make: Callable[[int, Callable[[torch.Tensor], torch.Tensor]], Any] | None = None) -> list[Any]:
    """The presences of all ranks; ``make`` makes one."""
    meetings = Meetings(len(RANKS))
    made: list[Any] = [None] * len(RANKS)

    def run(place: int) -> None:
        def rows(row: torch.Tensor) -> torch.Tensor:
            return meetings.rows(place, row)

        made[place] = make(place, rows) if make else Presence(RANKS, place, rows)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(RANKS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return made


def end(presence: Presence) -> None:
    """What the operating system does when a process ends."""
    for peer in presence._peers.values():
        peer.connection.close()


def test_each_rank_sees_which_one_ended() -> None:
    first, second, third = connected()
    assert [each.gone(RANKS) for each in (first, second, third)] == [[], [], []]
    end(second)
    for each in (first, third):
        assert each.gone_within(5.0, RANKS) == [1]
        assert each.gone(RANKS) == [1]  # it stays known
        assert each.gone([4, 9]) == []  # by a group that it is not in
        assert each.gone([7, 9]) == [0]  # by its place in the group that is asked for
    end(third)
    assert first.gone_within(5.0, [9]) == [0]
    assert first.gone(RANKS) == [1, 2]


@pytest.mark.quick(0)
@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_rank_that_closes_its_engine_has_not_ended(how: str) -> None:
    first, second, third = connected()
    if how == "closed":
        second.close()
    del second
    assert first.gone_within(0.3, RANKS) == third.gone_within(0.3, RANKS) == []
    end(third)
    assert first.gone_within(5.0, RANKS) == [2]  # the others are still watched


def test_waiting_ends_once_nobody_is_watched() -> None:
    first, *others = connected()
    for each in others:
        each.close()
    start = time.monotonic()
    assert first.gone_within(20.0, RANKS) == []
    assert time.monotonic() - start < 10


def test_a_forked_process_does_not_stand_for_the_rank() -> None:
    first, second, _ = connected()
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        end(second)
        assert first.gone_within(5.0, RANKS) == [1]
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_stranger_is_not_taken_for_a_rank() -> None:
    """It knows the address, and not the key; and it is there before any rank knows the address."""
    strangers: list[socket.socket] = []

    def make(place: int, rows: Callable[[torch.Tensor], torch.Tensor]) -> Presence:
        said: list[torch.Tensor] = []

        def rows_with_stranger(row: torch.Tensor) -> torch.Tensor:
            said.append(row)
            if len(said) == 2 and place < 2:  # the last rank listens for nobody
                host, port = bytes(row.tolist())[module._KEY_BYTES :].rstrip(b"\0").decode().split()
                strangers.append(socket.create_connection((host, int(port))))
                strangers[-1].sendall(b"\x01" * module._KEY_BYTES + module._number(2))
            return rows(row)

        return Presence(RANKS, place, rows_with_stranger)

    first, second, third = connected(make)
    assert len(strangers) == 2
    for each in strangers:
        each.close()
    assert first.gone_within(0.3, RANKS) == second.gone(RANKS) == []
    end(third)
    assert first.gone_within(5.0, RANKS) == second.gone_within(5.0, RANKS) == [2]


def test_ranks_that_cannot_connect_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionRefusedError("refused on purpose")

    monkeypatch.setattr(module, "_CONNECT_S", 0.5)
    monkeypatch.setattr(socket, "create_connection", refuse)
    first, second, third = connected()
    end(second)
    assert [each.gone_within(0.2, RANKS) for each in (first, third)] == [[], []]
    assert words(first.gone(RANKS)) == "another rank has probably ended"


def test_a_rank_without_an_address_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    create = socket.create_server

    def only_some(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not refused[0]:
            return create(*args, **kwargs)
        raise OSError("no sockets on purpose")

    refused = [threading.current_thread()]

    def make(place: int, rows: Callable[[torch.Tensor], torch.Tensor]) -> Presence:
        if place == 0:
            refused[0] = threading.current_thread()
        return Presence(RANKS, place, rows)

    monkeypatch.setattr(socket, "create_server", only_some)
    first, second, third = connected(make)
    end(third)
    assert first.gone_within(0.2, RANKS) == []
    assert second.gone_within(5.0, RANKS) == [2]


def test_a_rank_that_gave_up_before_it_was_accepted_has_not_seen_the_end_of_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other rank stopped listening, which closes the connection that this one has."""
    monkeypatch.setattr(Presence, "_accept", lambda *args: None)
    first, second, third = connected()
    assert [each.gone_within(0.3, RANKS) for each in (first, second, third)] == [[], [], []]


@pytest.mark.parametrize(
    "ranks, said",
    [([1], "rank 1 has ended"), ([1, 3], "ranks 1, 3 have ended"), ([], "another rank has probably ended")],
)
def test_words(ranks: list[int], said: str) -> None:
    assert words(ranks) == said


def test_a_connection_that_cannot_send_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []
    create = socket.create_connection

    def create_closed_for_writing(*arguments: Any, **options: Any) -> socket.socket:
        one = create(*arguments, **options)
        one.shutdown(socket.SHUT_WR)
        made.append(one)
        return one

    def accept_nobody(*_: Any) -> None:
        until = time.monotonic() + 20
        while len(made) < 3 and time.monotonic() < until:
            time.sleep(0.01)

    monkeypatch.setattr(socket, "create_connection", create_closed_for_writing)
    monkeypatch.setattr(Presence, "_accept", accept_nobody)
    connected()
    assert len(made) == 3  # of the second rank, and two of the third
    assert [each.fileno() for each in made] == [-1, -1, -1]

"""Ranks hear in the store which others are missing, and take nothing else for that."""

from __future__ import annotations

import copy
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forks import in_child
from torch._C._distributed_c10d import FileStore, HashStore

from longshore.errors import RankError
from longshore.ranks import presence as module
from longshore.ranks.presence import LAUNCHER, Presence, words

ALL = [0, 1, 2]


class Store:
    """What the presences of all ranks use, which are in one process here; it may be cut off."""

    def __init__(self) -> None:
        self._inner, self.answers, self.broken = HashStore(), threading.Event(), threading.Event()
        self.answers.set()

    def clone(self) -> Store:
        return copy.copy(self)

    def _reached(self) -> HashStore:
        self.answers.wait()
        if self.broken.is_set():
            raise RuntimeError("Broken pipe")
        return self._inner

    def set(self, key: str, value: str) -> None:
        self._reached().set(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._reached().check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._reached().multi_get(keys)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(module, "_BEAT_S", 0.05)
    monkeypatch.setattr(module, "_SILENT_S", 1.5)
    monkeypatch.setattr(module, "_ENDED_S", 0.5)
    made = Store()
    yield made
    made.broken.set()
    made.answers.set()


@pytest.fixture
def ranks(store: Store) -> list[Presence]:
    made = [Presence(store, rank, len(ALL)) for rank in ALL]
    for each in made:
        until(lambda each=each: each.missing(ALL) == [] and len(each._heard) == 2)
    return made


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def stop(presence: Presence) -> None:
    """What SIGKILL does, or SIGSTOP for long."""
    presence.exchange = lambda store, ends: False  # pyright: ignore[reportAttributeAccessIssue]


def test_who_says_nothing_is_missing(ranks: list[Presence]) -> None:
    first, second, third = ranks
    stop(second)
    for each in (first, third):
        until(lambda each=each: each.missing(ALL) == [1])
        assert each.missing([0, 2]) == []
        assert each.missing([1]) == [1]
    stop(third)
    until(lambda: first.missing(ALL) == [1, 2])


def test_who_says_that_it_ends_is_missing_at_once_where_a_connection_broke(ranks: list[Presence]) -> None:
    first, second, third = ranks
    second.close()
    start = time.monotonic()
    assert first.who_broke(ALL) == [1]
    assert time.monotonic() - start < 20
    until(lambda: third.missing(ALL) == [1])


def test_who_gives_up_is_not_named_and_the_one_that_is_missing_is(ranks: list[Presence]) -> None:
    first, second, third = ranks
    second.leave([2])
    assert first.who_broke([0, 1]) == [2]  # which is of another group
    second.close()
    assert first._said == "left 2"
    until(lambda: third.missing(ALL) == [2])  # it hears what the others took it for
    first.close()
    assert third.missing([0, 1]) == [2]


def test_a_broken_connection_between_ranks_that_are_there(ranks: list[Presence]) -> None:
    first, second, _ = ranks
    assert first.who_broke(ALL) == []
    assert first._said == ""
    assert second.missing(ALL) == []


def test_one_that_ended_before_it_said_anything(store: Store) -> None:
    first, second = Presence(store, 0, 3), Presence(store, 1, 3)
    until(lambda: first.missing(ALL) == [] and len(first._heard) == 1)
    for _ in range(20):
        time.sleep(2 * module._SILENT_S / 20)
        assert first.missing(ALL) == []  # it may come later
    assert first.who_broke([0, 1]) == []
    assert second.who_broke(ALL) == [2]


def test_one_that_was_stopped_does_not_take_the_others_for_missing(
    ranks: list[Presence], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _, _ = ranks
    clock, ahead = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock() + ahead)
    for _ in range(3):
        ahead += 1000.0
        assert first.missing(ALL) == []
        time.sleep(0.1)
        assert first.missing(ALL) == []


def test_a_process_without_others_that_wait_does_not_ask(store: Store) -> None:
    first = Presence(store, 0, 3)
    first._asked_at = time.monotonic() - 1000
    Presence(store, 1, 3)
    time.sleep(0.3)
    assert first._heard == {}


@pytest.mark.parametrize("launched, keeper", [("", 0), ("True", LAUNCHER)])
@pytest.mark.parametrize("how", ["cut", "broken"])
def test_the_store_itself_is_missing(
    how: str, launched: str, keeper: int, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", launched)
    _, second, third = [Presence(store, rank, 3) for rank in ALL]
    until(lambda: second.missing(ALL) == [] and len(second._heard) == 2)
    if how == "cut":
        store.answers.clear()
    else:
        store.broken.set()
    until(lambda: second.missing(ALL) == [keeper])
    until(lambda: third.missing([1, 2]) == [keeper])
    assert ("launcher" in words([keeper])) == (keeper == LAUNCHER)


def test_values_are_gathered(ranks: list[Presence]) -> None:
    def gathered(what: str, value: object) -> list[list[Any]]:
        found: list[Any] = [None] * 3

        def run(rank: int) -> None:
            found[rank] = ranks[rank].gather(what, (rank, value), 20.0)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in ALL]
        for each in threads:
            each.start()
        for each in threads:
            each.join(30)
        return found

    for value in ("one", b"\0" * 100_000):
        assert gathered("first", value) == [[(rank, value) for rank in ALL]] * 3
    assert gathered("second", None) == [[(rank, None) for rank in ALL]] * 3


def test_values_of_a_group_before_are_not_taken(store: Store, ranks: list[Presence]) -> None:
    """A store may serve several default process groups, one after the other, as torchrun's does."""
    threads = [threading.Thread(target=each.gather, args=("first", each.rank, 20.0)) for each in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for each in ranks:
        each.close()
    second = Presence(store, 0, len(ALL))
    with pytest.raises(RankError, match=r"rank 0: first: rank 1, 2, which made no call .*, did not come within 0.3"):
        second.gather("first", 0, 0.3)
    assert second.missing(ALL) == []  # nor that those have ended


def test_ranks_that_spoke_in_different_groups_before_hear_each_other(store: Store, ranks: list[Presence]) -> None:
    """Not all ranks need to have made an optimizer in the process group that was before."""
    other = Store()
    first, second = Presence(other, 0, 2), Presence(other, 1, 2)
    until(lambda: first.missing([0, 1]) == [] and len(first._heard) == 1)
    threads = [threading.Thread(target=each.gather, args=("first", each.rank, 20.0)) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(each._keys == ranks[0]._keys for each in (first, second))


def test_it_is_logged_for_whom_a_rank_waits(
    store: Store, ranks: list[Presence], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RankError, match="rank 0: saving x: rank 1, 2 did not come within 1 s; all ranks have to make"):
        ranks[0].gather("saving", None, 1.0, 0.2, "saving x")
    (told,) = caplog.messages
    assert re.fullmatch(
        r"rank 0 has waited 0 s: saving x: rank 1, 2 did not come yet; all ranks have to make the same calls", told
    )
    caplog.clear()
    own = Store()
    first, _ = Presence(own, 0, 3), Presence(own, 1, 3)
    with pytest.raises(RankError, match="rank 1, 2, of which 2 made no call of longshore"):
        first.gather("saving", None, 1.0, 0.2)
    assert "of which 2 made no call of longshore in this process group, or stopped before it, did" in caplog.text


def test_the_only_other_rank_is_the_one_that_ended(store: Store) -> None:
    first = Presence(store, 0, 2)
    until(lambda: first.missing([0, 1]) == [] and first._listened)
    assert first.who_broke([0, 1]) == [1]


def test_ranks_part_from_a_store_whose_process_ends(store: Store, ranks: list[Presence]) -> None:
    """Whoever speaks to a store that has ended makes torch print a trace of calls."""
    first, second, third = ranks
    start = time.monotonic()
    first.close()
    assert not any(each._thread.is_alive() for each in ranks)
    assert time.monotonic() - start < module._LAST_WORDS_S
    until(lambda: second.missing(ALL) == third.missing(ALL) == [0])


def test_ranks_part_from_a_first_rank_that_gave_up(ranks: list[Presence]) -> None:
    first, second, third = ranks
    stop(third)
    second.missing(ALL)
    until(lambda: first.missing(ALL) == [2])
    assert first.who_broke(ALL) == [2]
    first.close()
    until(lambda: not second._thread.is_alive())
    assert second.who_broke([0, 1]) == [2]


def test_a_store_that_is_a_file_does_not_end_with_the_first_rank(store: Store, tmp_path: Path) -> None:
    own = FileStore(str(tmp_path / "store"), 3)
    first, second, third = [Presence(own, rank, 3) for rank in ALL]
    until(lambda: second.missing(ALL) == [] and len(second._heard) == 2)
    first.close()
    until(lambda: second.missing(ALL) == [0])
    for _ in range(20):
        time.sleep(2 * module._SILENT_S / 20)
        assert second.missing([1, 2]) == []
    stop(third)
    until(lambda: second.missing([1, 2]) == [2])


def test_the_process_of_the_store_does_not_wait_for_ranks_that_are_gone(store: Store, ranks: list[Presence]) -> None:
    first, second, third = ranks
    third.close()
    stop(second)
    first.close()
    assert not first._thread.is_alive()


def test_a_group_that_is_gone_is_not_spoken_to(store: Store) -> None:
    own = Store()
    one = Presence(own, 1, 2)
    until(lambda: one._count > 0)
    inner = own._inner
    del own
    until(lambda: not one._thread.is_alive())
    assert "ended" not in inner.get(f"{one._keys}/1").decode()


def test_who_does_not_come_is_named(ranks: list[Presence]) -> None:
    with pytest.raises(RankError, match=r"rank 0: saving: rank 1, 2 did not come within 0.3 s; all ranks have to make"):
        ranks[0].gather("saving", None, 0.3)
    stop(ranks[2])
    with pytest.raises(RankError, match=r"rank 1: loading: rank 2 has ended or cannot be reached; look at the first"):
        ranks[1].gather("loading", None, 20.0)
    assert ranks[0].who_broke(ALL) == [2]


def test_a_dropped_presence_and_a_dropped_group_end_the_thread(store: Store) -> None:
    one = Presence(store, 0, 2)
    thread = one._thread
    del one
    until(lambda: not thread.is_alive())
    own = Store()
    other = Presence(own, 0, 2)
    until(lambda: other._count > 0)
    del own
    until(lambda: not other._thread.is_alive())


def test_a_forked_process_does_not_speak_for_the_rank(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with the thread of the process that forked it, nor anew; in a group of its own it does."""
    groups = [store]
    monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(module.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(module.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(module.dist.distributed_c10d, "_get_default_store", lambda: groups[-1])
    monkeypatch.setattr(module, "_current", Presence(store, 0, 2))

    def in_a_group_of_its_own() -> bool:
        groups.append(Store())
        found = module.presence()
        return found is not None and found.spoke.is_set()

    assert in_child(lambda: module._current) == "None"
    assert in_child(module.presence) == "None"
    assert in_child(in_a_group_of_its_own) == "True"
    assert module.presence() is module._current


@pytest.mark.parametrize(
    "missing, said",
    [
        ([1], "rank 1 has ended or cannot be reached"),
        ([1, 3], "ranks 1, 3 have ended or cannot be reached"),
        ([], "another rank has probably ended"),
    ],
)
def test_words(missing: list[int], said: str) -> None:
    assert words(missing) == said

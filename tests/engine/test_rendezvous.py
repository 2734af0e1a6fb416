"""The ranks of one start find each other, whatever the store has seen before, and who is missing is named."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from longshore.engine.ranks import Start


def start_of(store: Store, rank: int, world_size: int = 3, timeout_s: float = 20.0) -> Start:
    return Start(store, rank, world_size, timedelta(seconds=timeout_s))


def met(store: Store, late: int | None = None) -> list[Store]:
    """What the ranks of a start agree on; one may come late."""

    def run(rank: int) -> Store:
        time.sleep(0.3 * (rank == late))
        return start_of(store, rank).meet()

    with ThreadPoolExecutor(3) as ranks:
        return list(ranks.map(run, range(3)))


@pytest.mark.parametrize("late", [0, 1, 2])
def test_each_start_meets_apart_from_those_before_it(late: int) -> None:
    store = HashStore()
    met(store)[0].set("address", "of the first")
    for _ in range(2):
        first, *others = met(store, late)
        assert not first.check(["address"])
        first.set("address", "of another")
        assert [other.get("address") for other in others] == [b"of another"] * 2


def test_a_rank_that_is_started_again_while_the_others_wait() -> None:
    store = HashStore()
    with pytest.raises(TimeoutError, match="rank 0 did not come"):
        start_of(store, 2, timeout_s=0.2).meet()
    with pytest.raises(TimeoutError, match="rank 1, 2 did not come"):  # 2 has ended, and 1 was never there
        start_of(store, 0, timeout_s=0.2).meet()
    with ThreadPoolExecutor(3) as ranks:
        waiting = [ranks.submit(start_of(store, rank).meet) for rank in (0, 1)]
        time.sleep(0.3)
        assert not any(each.done() for each in waiting)
        start_of(store, 2).meet()
        for each in waiting:
            each.result()


def test_who_is_missing_after_some_have_met() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as ranks:
        waiting = [ranks.submit(start_of(store, rank, timeout_s=0.5).meet) for rank in (0, 2)]
        for each in waiting:
            with pytest.raises(TimeoutError, match="rank 1 did not come"):
                each.result()


def connected(makes: list[Any], timeout_s: float) -> list[str]:
    store = PrefixStore("one", HashStore())

    def run(rank: int) -> str:
        try:
            start_of(store, rank, len(makes), timeout_s).connect(store, makes[rank])
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    with ThreadPoolExecutor(len(makes)) as ranks:
        return list(ranks.map(run, range(len(makes))))


def nothing() -> None:
    return None


def test_all_are_told_that_one_could_not_connect() -> None:
    """The others would wait for it in gloo, for longer than anybody said."""
    over = threading.Event()

    def refused() -> None:
        raise RuntimeError("connection refused, on purpose\nand a line of C++")

    try:
        found = connected([over.wait, refused, nothing], 20.0)
    finally:
        over.set()
    told = "ConnectionError: rank 1 could not connect (connection refused, on purpose)"
    assert found == [told, "RuntimeError: connection refused, on purpose\nand a line of C++", told]


def test_the_timeout_is_the_one_that_was_given() -> None:
    over = threading.Event()
    began = time.monotonic()
    try:
        found = connected([nothing, over.wait, nothing], 0.5)
    finally:
        over.set()
    assert found[0] == found[2] == "TimeoutError: rank 1 could not be connected"
    assert found[1].startswith("TimeoutError: rank ")
    assert time.monotonic() - began < 20


def test_all_have_connected_when_one_goes_on() -> None:
    made: list[int] = []

    def slowly() -> None:
        time.sleep(0.3)
        made.append(1)

    assert connected([nothing, slowly], 20.0) == ["", ""]
    assert made == [1]

"""Whatever ranks wait for, one that stops answering is named, and long before the timeout of their group."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ranks import RankFailure, Ranks, forking_context, waiting_cases


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks(3, timeout_s=60)
    yield made
    made.stop()


def check(ranks: Ranks, where: str, stage: int, silent_s: float, folder: Path) -> None:
    with pytest.raises(RankFailure, match=r"^rank 2: ended with exit code -9$"):
        ranks(waiting_cases.last_stops, where, stage, silent_s, str(folder))
    for rank in range(2):
        said, seconds = (folder / f"told{rank}").read_text().splitlines()
        assert "rank 2 has ended or cannot be reached" in said, said
        assert said.startswith("CommandError: " if where == "a run's sums" else "RankError: "), said
        assert float(seconds) < 30


@pytest.mark.medium
@pytest.mark.parametrize(
    "where, stage",
    [
        ("step", 0),
        ("exchange", 2),
        ("gather", 1),
        pytest.param("gather", 3, marks=pytest.mark.needs_torch("stage 3")),
        ("saving", 2),
        ("one line", 2),
        ("a run's sums", 2),
        ("a new engine", 2),
        ("before a first save", 0),
    ],
)
def test_a_rank_that_stops_is_named(where: str, stage: int, ranks: Ranks, tmp_path: Path) -> None:
    check(ranks, where, stage, 2.0, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["exchange", "saving"])
def test_a_rank_that_stops_is_named_within_half_a_minute(where: str, ranks: Ranks, tmp_path: Path) -> None:
    check(ranks, where, 2, 0.0, tmp_path)


@pytest.mark.parametrize(
    "how, late_s", [("left", 0.0), ("left", 1.5), ("destroyed", 0.0), ("ours", 0.0), ("ours", 1.5)]
)
def test_a_program_ends_without_a_word(how: str, late_s: float, tmp_path: Path) -> None:
    """Whoever speaks to a store whose process has ended makes torch print a trace of calls."""
    context = forking_context()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [tmp_path / f"{rank}.stderr" for rank in range(3)]
    processes = [
        context.Process(target=waiting_cases.end, args=(rank, port, late_s, how, str(words[rank]))) for rank in range(3)
    ]
    for each in processes:
        each.start()
    for each in processes:
        each.join(60)
    assert [each.exitcode for each in processes] == [0] * 3
    assert [each.read_text() for each in words] == [""] * 3

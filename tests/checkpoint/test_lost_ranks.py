"""Ranks that are lost at the end of a save: what is whole on the disk is not told as failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from queue import Queue
from typing import Any, NoReturn

import pytest
import torch

from longshore.checkpoint import folder as folder_module
from longshore.checkpoint import saving
from longshore.checkpoint.boxes import SavedBoxes
from longshore.checkpoint.folder import Draft, WholeCheckpoint
from longshore.checkpoint.rank_group import RankGroup
from longshore.checkpoint.saving import Content, Target, write
from longshore.checkpoint.values import Values
from longshore.errors import RankError
from longshore.layout.boxes import Box

NUMEL = 1000


class Pair(RankGroup):
    """One of two ranks on threads, which tell each other values; at one of these times it loses the other, which may
    have what this one said last."""

    def __init__(self, rank: int, said: list[Queue[Any]], lost_at: int) -> None:
        super().__init__()
        self.rank, self.world_size, self._said, self._left = rank, 2, said, lost_at

    def gather(self, value: Any) -> list[Any]:
        self._said[self.rank].put((value,))
        self._left -= 1
        if self._left < 0:
            self._said[self.rank].put(None)
            self._lose()
        theirs = self._said[1 - self.rank].get(timeout=60)
        if theirs is None:
            self._said[self.rank].put(None)
            self._lose()
        return [value, *theirs] if self.rank == 0 else [*theirs, value]

    def _lose(self) -> NoReturn:
        self.lost = True
        raise RankError(f"rank {self.rank}: rank {1 - self.rank} has ended or cannot be reached")


def save_on_two(root: Path, lost_at: Sequence[int], **more: Any) -> list[str]:
    """What each rank was told, nothing where its save was good."""
    said: list[Queue[Any]] = [Queue(), Queue()]
    told = ["never ended"] * 2

    def run(rank: int) -> None:
        values = torch.full((NUMEL,), 7.0)
        part = SavedBoxes("model.weight", torch.float32, (NUMEL,), [Box((0,), (NUMEL,))], lambda: values)
        about = Values.of({"number": 7, "again": torch.tensor(7)}) if rank == 0 else Values.of({})
        parts = [part] if rank == 0 else []
        content = Content(parts, about, Values.of({"rank": rank}), {}, 7, "run")
        try:
            write(content, Target(root, "a", **more), Pair(rank, said, lost_at[rank]))
            told[rank] = ""
        except RankError as error:
            told[rank] = str(error)
        except Killed:
            told[rank] = "killed"
            said[rank].put(None)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    return told


class Killed(BaseException):
    pass


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_COMMIT_S", 2.0)
    monkeypatch.setattr(saving, "_RENAMING_S", 0.2)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("latest", [True, False])
@pytest.mark.parametrize("lost_at", [(99, 2), (99, 3), (99, 4), (99, 5), (3, 3), (4, 4), (5, 4), (4, 99), (5, 99)])
def test_every_rank_sees_on_the_disk_whether_a_save_is_complete(
    lost_at: Sequence[int],
    latest: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    former = folder_module.take_name

    def slowly(*args: Any) -> Any:
        time.sleep(0.5)  # the other rank is lost meanwhile
        return former(*args)

    monkeypatch.setattr(folder_module, "take_name", slowly)
    told = save_on_two(tmp_path, lost_at, latest=latest)
    if (tmp_path / "a").exists():
        WholeCheckpoint(tmp_path / "a").verify()
        assert told == ["", ""]
        assert f"{tmp_path / 'a'} is complete, and" in caplog.text
    else:
        assert all("has ended or cannot be reached" in each for each in told)
    # The first rank completes it unless it hears of the loss before.
    assert (tmp_path / "a").exists() == (min(lost_at[0] - 1, lost_at[1]) >= 3)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_first_rank_that_is_killed_while_it_completes_a_save(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert save_on_two(tmp_path, (99, 99)) == ["", ""]  # a former one of the same content and tag
    (tmp_path / "latest").write_text("b")

    def killed(*_: Any) -> Any:
        raise Killed

    monkeypatch.setattr(Draft, "discard", lambda _: None)
    monkeypatch.setattr(folder_module, "take_name" if when == "before" else "write_latest", killed)
    monkeypatch.setattr(RankGroup, "together", lambda self, work: (work(), self.gather(None))[0])
    told = save_on_two(tmp_path, (99, 99))
    assert told[0] == "killed"
    assert told[1].startswith("rank 1: rank 0 has ended or cannot be reached; ")
    if when == "before":
        assert "does not see whether the first rank completed" in told[1] and "longshore inspect" in told[1]
    else:
        assert f"{tmp_path / 'a'} is complete, and {tmp_path / 'latest'} does not name it: load it by" in told[1]
        WholeCheckpoint(tmp_path / "a").verify()

"""What ranks tell each other of the memory that they share; here two of them, of which one is played."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from longshore.sharding import shared_memory as module
from longshore.sharding.shared_memory import SharedMemory


@pytest.fixture
def blocks() -> Iterator[SharedMemory]:
    made = SharedMemory(0, lambda row: torch.stack([row, row]))
    assert not made.works, "nobody wrote the other rank's word"
    made.works = True
    yield made
    made.close()


def test_memory_is_free_when_all_say_so(blocks: SharedMemory) -> None:
    found = blocks.lend(100, held=True)
    assert found is not None
    first, memory = found
    mine = blocks.come(first)
    assert blocks.met([mine, mine])
    del memory, found
    for other_is_done in (False, True):
        found = blocks.lend(100, held=True)
        assert found is not None and found[0] is not first
        mine = blocks.come(found[0])
        theirs = [*mine[:3], mine[3] if other_is_done else mine[3] & ~1]
        assert blocks.met([mine, theirs])
        assert first.free == other_is_done
        del found
    found = blocks.lend(100, held=True)
    assert found is not None and found[0] is first


@pytest.mark.parametrize("place", [0, 1, 2], ids=["generation", "index", "capacity"])
def test_ranks_that_came_with_other_memory_begin_anew(place: int, blocks: SharedMemory) -> None:
    found = blocks.lend(100, held=False)
    assert found is not None
    mine = blocks.come(found[0])
    theirs = [value + (place == number) for number, value in enumerate(mine)]
    assert not blocks.met([mine, theirs])
    assert blocks.works
    again = blocks.lend(100, held=False)
    assert again is not None and again[0] is not found[0]
    row = blocks.come(again[0])
    assert row[0] == max(mine[0], theirs[0]) + 1
    assert blocks.met([row, row])


def test_what_was_lent_before_the_ranks_began_anew_is_not_shared(blocks: SharedMemory) -> None:
    found = blocks.lend(100, held=False)
    assert found is not None
    mine = blocks.come(found[0])
    pending = blocks.lend(100, held=False)
    assert pending is not None
    assert not blocks.met([mine, [*mine[:1], mine[1] + 1, *mine[2:]]])
    row = blocks.come(pending[0])
    assert not blocks.met([row, row])
    assert blocks.works


def test_files_that_a_killed_rank_left_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FOLDER", tmp_path)
    stale, recent, other = (tmp_path / name for name in ("longshore-ab-1-1", "longshore-cd-1-1", "another"))
    for path in (stale, recent, other):
        path.write_bytes(b"x")
    for path in (stale, other):
        os.utime(path, (0, 0))
    SharedMemory(0, lambda row: torch.stack([row, row]))
    assert sorted(tmp_path.iterdir()) == sorted([recent, other])


_ENDS = """
import os, torch
from longshore.sharding.shared_memory import SharedMemory
made = SharedMemory(0, lambda row: torch.stack([row, row]))
made.works = True
path = made.lend(100, held=False)[0].path
print(path, flush=True)
if os.fork() == 0:
    raise SystemExit
os.wait()
assert path.exists(), "it is not the child's to remove"
raise SystemExit("an exception")
"""


@pytest.mark.slow
def test_a_process_that_ends_leaves_no_memory_behind() -> None:
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", _ENDS], capture_output=True, text=True)
    assert ended.stderr.strip() == "an exception"
    path = Path(ended.stdout.strip())
    assert path.name.startswith("longshore-") and not path.exists()
